"""`outrider bench` of several drafters: what it refuses; its Markdown is a table whatever things are called."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from outrider.cli import main
from outrider.cli.survey import Survey, _accepted
from outrider.measure.page import table
from outrider.measure.prompts import Prompt
from tests.models.tiny import make_module, make_tokenizer


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--limit", "0"], "limit=0"),
        (["--limit", "-2"], "limit=-2"),
        (["--against", "float32"], "against and repeats are for one drafter"),
        (["--repeats", "3"], "against and repeats are for one drafter"),
        (["--rows", "no/such/folder/rows"], "no/such/folder/rows cannot be written"),
        (["--no-adaptive"], "adaptive cannot be set for several drafters"),
        (["--depth", "0"], "depth=0"),
        (["--rows", "rows", "--only", "speed"], "leave --rows or --only speed out"),
        (["--drafter", "ngram,"], "'' is no candidate"),
        (["--drafter", "none,ngram"], "'none' is no candidate"),
        (["--drafter-model", "w"], "drafter_model='w' is for small_model"),
    ],
)
def test_what_the_table_would_not_honour_is_refused(words, part, capfd):
    assert main(["bench", "m", "--drafter", "ngram,suffix", *words]) == 2
    said = capfd.readouterr().err
    assert part in said
    assert said.count("\n") == 1


def test_rows_overwrite_nothing(tmp_path, capfd):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Say so."}\n')
    words = ["bench", "m", "--drafter", "ngram,suffix", "--prompts", str(prompts), "--rows", str(prompts)]
    assert main(words) == 2
    assert "holds something already: move it away" in capfd.readouterr().err
    assert prompts.read_text() == '{"prompt": "Say so."}\n'


def test_a_drafter_named_twice_is_measured_once():
    survey = Survey("m", {"drafter": "ngram, suffix,ngram"}, [], None, [0.0], 8, ("speed",))
    assert survey.drafters() == ["ngram", "suffix"]


def test_a_name_with_a_bar_or_a_line_break_stays_in_its_cell():
    found = list(table(("T", "task|one"), [("0", "what\nfailed | why")]))
    assert found == ["| T | task\\|one |", "|---:|---|", "| 0 | what failed \\| why |"]


def _figures(row):
    return [str(row[name]) for name in ("drafter", "temperature", "acceptance", "shape", "tau", "cycles")]


def test_one_rule_may_be_asked_for():
    survey = Survey("m", {"drafter": "ngram", "acceptance": "rejection"}, [], None, [0.0, 1.0], 8, ("acceptance",))
    rules = {(v.temperature, v.acceptance) for v in survey.variants()}
    assert rules == {(0.0, "match"), (1.0, "rejection")}


def test_several_processes_find_what_one_finds(tmp_path):
    make_module("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    prompts = [Prompt(f"{task}:{i}", (5 + i, 6, 7, 5 + i, 6, 7, 5 + i), task) for i in range(2) for task in ("a", "b")]
    engine = {"drafter": "ngram,suffix", "num_slots": 1000, "self_test": False, "depth": 2, "width": 2}
    survey = Survey(str(tmp_path), engine, prompts, None, [0.0, 1.0], 12, ("acceptance",))
    kept = [tmp_path / "one", tmp_path / "two"]
    alone, shared = (
        _accepted(replace(survey, processes=n, rows=file), lambda text: None)
        for n, file in zip((1, 2), kept, strict=True)
    )
    told = [sorted(map(_figures, map(json.loads, file.read_text().splitlines()))) for file in kept]
    assert told[0] == told[1] == sorted(_figures(row.to_json()) for row in alone[0])
    assert [row.variant for row in shared[0]] == survey.variants()
    figures = [[(row.to_json()["tau"], row.by_position()) for row in rows] for rows, _ in (alone, shared)]
    assert figures[0] == figures[1]
    assert alone[1] == shared[1]
