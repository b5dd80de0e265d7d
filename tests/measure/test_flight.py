"""Cycles in flight in a report: told as such, timed as the engine runs them and part by part, and changing no text."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError
from outrider.measure.bars import bars
from outrider.measure.cycle import LOCKSTEP, answer
from outrider.measure.flight import IN_FLIGHT, Flew, Log, decoding, flies, measure_shape, parts_of
from outrider.measure.gpu_report import Reporter, Scope
from outrider.measure.report_page import markdown
from outrider.measure.synthetic import measure_synthetic
from outrider.models.seats import Outline
from outrider.record import Record, RequestCycle
from tests import artefacts
from tests.models.tiny import make_module, make_target, make_tokenizer

PROMPTS = [(5, 6, 7), (9, 8, 7, 6, 5), tuple(range(10, 30))]
SHAPE = {"max_position_embeddings": 1200}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    make_module("llama", **SHAPE).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def opened(folder: str, **own: Any) -> LLM:
    settings: dict[str, Any] = {"num_slots": 4096, "self_test": False, "threads": 1, "in_flight": 2, **own}
    if settings["drafter"] == "eagle3":
        settings |= {"adaptive": False, "depth": 3, "nodes": 64}  # a head of random weights would not be asked for long
        settings["drafter_model"] = artefacts.folder("eagle3", make_target(make_module("llama", **SHAPE)))
    return LLM(folder, **{**settings, "prefix_cache": False})


@pytest.fixture(scope="module")
def saved() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def report(folder, saved) -> dict[str, Any]:
    scope = Scope(
        drafters=("eagle3", "ngram"),
        prompts=PROMPTS,
        max_tokens=24,
        together=(1, 2),
        context=16,
        widths=(1, 3, 16),
        batches=(2,),
        repeats=2,
        tau=2.5,
        depth=3,
        buffer=2**20,
        only=("passes", "speculative", "shapes", "synthetic"),
    )
    return Reporter(
        lambda own: opened(folder, **own), scope, save=lambda found: saved.append(json.loads(json.dumps(found)))
    ).run()


def test_every_row_says_which_way_it_ran(report):
    ways = {(row["drafter"], row["law"], bool(row["synthetic"])): row["way"] for row in report["speculative"]}
    assert ways == {
        ("eagle3", "T=0", False): IN_FLIGHT,
        ("eagle3", "T=0", True): IN_FLIGHT,
        ("eagle3", "T=1", False): IN_FLIGHT,
        ("eagle3", "T=1, top-p, penalties", False): LOCKSTEP,
        ("ngram", "T=0", False): LOCKSTEP,
        ("ngram", "T=1", False): LOCKSTEP,
        ("ngram", "T=1, top-p, penalties", False): LOCKSTEP,
    }
    assert [row["way"] for row in report["plain"]] == [IN_FLIGHT] * 4 + [LOCKSTEP] * 2


def test_rows_in_flight_have_parts_and_change_no_text(report):
    rows = [row for row in report["speculative"] if row["way"] == IN_FLIGHT]
    for row in rows:
        assert row["cycle"] == pytest.approx(row["target"] + row["draft"] + row["rest"])
        assert row["draft"] > 0
        assert row["device"] >= row["target"]
        assert 0.5 < row["in_flight"] <= 1
        assert row["bound"] == pytest.approx(row["ratio"] / row["share_of_bound"])
    assert [row["differing_texts"] for row in report["speculative"] if not row["synthetic"]] == [0] * 12
    assert [(row["law"], row["levels"], row["nodes"]) for row in report["shapes"] if row["drafter"] == "eagle3"] == [
        (law, *shape) for law in ("T=0", "T=1") for shape in ((5, 5), (8, 64))
    ]
    assert all(row["cycle"] > 0 and row["device"] > row["target"] for row in report["shapes"])


def test_what_the_bars_ask_for_comes_first_and_every_row_is_saved(report, saved):
    first = [entry["part"] for entry in report["elapsed"]][:10]
    assert first == [
        "loading, drafter none",
        "the read limit",
        "passes, 2 shapes",
        "none, T=0, 1 at once",
        "none, T=0, 2 at once",
        "passes, 2 shapes",
        *(f"none, {law}, {count} at once" for law in ("T=1", "T=1, top-p, penalties") for count in (1, 2)),
    ]
    assert [entry["part"] for entry in report["elapsed"]][11] == "eagle3, T=0, 1 at once"
    assert [(p["requests"], p["rows"]) for p in report["passes"]] == [(1, 1), (1, 3), (1, 16), (2, 1)]
    counts = [len(found["plain"]) + len(found["speculative"]) + len(found["shapes"]) for found in saved]
    assert all(later - earlier <= 1 for earlier, later in pairwise(counts))
    assert all(markdown(found) for found in saved)
    assert "Seconds of this report" in markdown(saved[-1])


def test_the_bars_are_read_from_the_way_that_each_row_ran(report):
    found = {bar.what: bar for bar in bars(report)}
    assert found["eagle3, T=0, in flight: rest"].wanted == "<= 0.3 ms"
    assert found["eagle3, T=1, top-p, penalties, lockstep: rest"].wanted == "<= 0.6 ms"
    assert found["ngram, T=0, lockstep: rest"].wanted == "<= 0.8 ms"
    assert found["eagle3, T=1, 64 nodes, in flight: rest"].wanted == "<= 0.3 ms"
    assert "a pass of 16 rows by a plain one" in found
    (row,) = [r for r in report["plain"] if (r["law"], r["together"]) == ("T=0", 1)]
    assert found["plain, T=0, in flight: of the read limit"].kept == (row["share_of_limit"] >= 0.85)


def test_synthetic_acceptance_in_flight_has_the_wanted_mean_and_leaves_the_engine_as_it_was(folder):
    llm = opened(folder, drafter="eagle3")
    before = [result.token_ids for result in llm.generate(PROMPTS, GREEDY)]
    for tau in (1.0, 2.5, 4.0):
        found = measure_synthetic(llm.engine, PROMPTS, tau, 120, depth=3)
        assert found.way == IN_FLIGHT
        assert found.tau == pytest.approx(tau, abs=0.12)
    assert [result.token_ids for result in llm.generate(PROMPTS, GREEDY)] == before


def test_parts_are_timed_by_their_shape_and_nobody_stays_in_the_air(folder):
    llm = opened(folder, drafter="eagle3")
    outlines = [Outline(2, 1, 2, 4), Outline(3, 2, 6, 4)]
    found = parts_of(llm.engine, PROMPTS[:2], GREEDY, outlines, repeats=2)
    assert list(found) == outlines
    assert all(0 < part.target < part.device and part.draft > 0 for part in found.values())
    assert not llm.engine.scheduler.running
    assert not llm.engine.pipeline._taken
    plain = opened(folder, drafter="none", in_flight=0)
    with pytest.raises(ConfigError, match="time it in lockstep"):
        parts_of(plain.engine, PROMPTS[:1], GREEDY, [Outline()])
    with pytest.raises(ConfigError, match="too few cycles were in flight"):
        measure_shape(llm.engine, [tuple(range(3, 103)) * 11 + tuple(range(3, 63))], GREEDY, 5, 1)


def test_the_time_of_taking_a_graph_belongs_to_no_cycle(folder, monkeypatch):
    """Neither the cycle that is launched then counts, nor the one that was in the air meanwhile."""
    llm = opened(folder, drafter="none")
    counts = []
    for taken in (0, 1):
        seen = [0]
        monkeypatch.setattr(type(llm.engine.pipeline), "num_captured", property(lambda self, seen=seen: seen[0]))
        log, steps = Log(llm.engine), []

        def note(record, log=log, steps=steps, seen=seen, taken=taken):
            steps.append(record)
            seen[0] += taken * (len(steps) == 6)
            log.note(record)

        answer(llm.engine, PROMPTS[:1], GREEDY, 1, note)
        counts.append(len(log.cycles()))
    assert counts[1] == counts[0] - 2


def test_tokens_are_those_of_all_cycles_and_times_those_of_full_ones(folder):
    llm = opened(folder, drafter="none")
    log = Log(llm.engine)
    replies = [request.output for request in answer(llm.engine, PROMPTS[:2], GREEDY, 2, log.note)]
    cycles = log.cycles()
    assert log.cycles() == []
    assert flies(cycles, 2)
    assert not flies(cycles, 3)
    slow = Flew(Record(1, 0, (RequestCycle(0, 0, 0, 1),), 0.0, 0.0, 0.0, 1000.0), None, 1)
    found = decoding(llm.engine, PROMPTS[:2], GREEDY, [*cycles, slow], repeats=2)
    assert found.cycles == len(cycles) + 1
    assert found.cycle < 100
    assert found.tokens_per_second < 0.1
    assert found.in_flight == pytest.approx(len(cycles) / (len(cycles) + 1))
    assert sum(len(reply) for reply in replies) == 48
