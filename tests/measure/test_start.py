"""Starts in processes of their own: the cold one compiles, the warm one does not, and one that dies is told of."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.measure import start
from outrider.measure.child import ChildError, run_child
from outrider.measure.report_page import _start
from outrider.measure.start import COLD, WARM, measure_starts
from outrider.record import Laps
from tests.models.tiny import make_module, make_tokenizer

SETTINGS = {"drafter": "none", "kernels": "plain", "threads": 1, "num_slots": 512, "self_test": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    make_module("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def test_what_passes_belongs_to_the_part_that_ends():
    times = iter([10.0, 11.0, 13.0, 13.5])
    laps = Laps(lambda: next(times))
    laps.end("weights")
    laps.end("checks")
    laps.end("weights")
    assert laps.seconds == {"weights": 1.5, "checks": 2.0}


@pytest.mark.slow
def test_two_starts_of_a_fresh_process(folder):
    told: list[str] = []
    cold, warm = measure_starts(folder, SETTINGS, [5, 6, 7], told.append)
    assert (cold.kind, warm.kind, len(told)) == (COLD, WARM, 2)
    for found in (cold, warm):
        assert found.error is None
        assert {"Python and imports", "kernels", "weights", "memory plan", "first token"} <= set(found.parts)
        assert found.seconds == pytest.approx(sum(found.parts.values()), abs=1.0)
    died, _ = measure_starts(folder + "/nowhere", SETTINGS, [5, 6, 7])
    assert "ModelError" in str(died.error)


def test_starts_share_a_cache_folder_that_is_empty_at_first(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    folders = []

    def run(module, job, environment):
        folder = Path(environment["OUTRIDER_CACHE"])
        assert "TRITON_CACHE_DIR" not in environment
        assert (folder / "models").resolve() == tmp_path / "models"
        assert sorted(p.name for p in folder.iterdir()) == (["kernels", "models"] if folders else ["models"])
        (folder / "kernels").mkdir(exist_ok=True)
        folders.append(folder)
        asked = job(folder)
        assert (module, asked["model"], asked["settings"]) == ("start_run", "m", {"drafter": "none"})
        return {"seconds": 2.0, "parts": {"weights": 1.5}}

    monkeypatch.setattr(start, "run_child", run)
    found = measure_starts("m", {"drafter": "none"}, "hello")
    assert [entry.seconds for entry in found] == [2.0, 2.0]
    assert folders[0] == folders[1]
    assert not folders[0].exists()
    assert (tmp_path / "models").is_dir(), "what the link led to is still there"


def test_a_start_that_dies_is_told_of(monkeypatch):
    def run(module, job, environment):
        raise ChildError("ModelError: there is no model 'm'")

    monkeypatch.setattr(start, "run_child", run)
    cold, warm = measure_starts("m", SETTINGS, "x")
    assert "ModelError" in str(cold.error)
    assert warm.seconds is None
    plan = dict.fromkeys(
        (
            "target",
            "drafter",
            "target_stack",
            "drafter_stack",
            "graphs",
            "passes",
            "sampler",
            "seats",
            "margin",
            "free",
        ),
        2**20,
    )
    started = {"kind": WARM, "seconds": 12.345, "parts": {"weights": 10.0, "first token": 0.5}, "error": None}
    died = {"kind": COLD, "seconds": None, "parts": {}, "error": cold.error}
    page = "\n".join(_start({"resolved": {"memory": plan}, "starts": [died, started]}))
    assert f"| {WARM} | 12.35 | weights 10.00, first token 0.50 |" in page
    assert "ModelError" in page
    assert "target stack 1" in page


def test_a_child_that_writes_nothing_or_takes_too_long(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{Path(start.__file__).parents[2]}")
    with pytest.raises(ChildError, match="timed out"):
        run_child("start_run", lambda room: {}, os.environ, patience=0.01)
    with pytest.raises(ChildError, match=r"No module named|it died"):
        run_child("nothing_of_that_name", lambda room: {}, os.environ)


def test_the_command_reports_starts_and_other_kinds_only_where_they_are_asked_for(
    folder, tmp_path, monkeypatch, capsys
):
    asked = []
    monkeypatch.setattr("outrider.measure.start.measure_starts", lambda *given: asked.append(given) or [])
    monkeypatch.setattr(
        "outrider.measure.gpu_report.measure_random",
        lambda models, *given: [{"name": name, "what": name, "error": "not here"} for name in models],
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w5 w6 w7"}\n')
    words = f"report {folder} --out {tmp_path / 'out'} --prompts {prompts} --drafter ngram --max-tokens 8 --tau 0"
    words += " --law T=0 --context 16 --num-slots 512 --no-self-test --no-peers --kernels plain --json"
    assert main([*words.split(), "--random-weights", "all"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in found["random"]] == ["window", "long", "experts"]
    ((model, settings, prompt, _),) = asked
    assert (model, prompt, settings["drafter"], settings["num_slots"]) == (folder, "w5 w6 w7", "none", 512)
    assert main([*words.split(), "--random-weights", "larger"]) == 2
    assert "window" in capsys.readouterr().err
