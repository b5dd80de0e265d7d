"""The survey's arithmetic: tasks, means of pooled taus, rates by position, and drafters that cannot be built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.errors import ConfigError
from outrider.measure.prompts import Prompt, read_prompts
from outrider.measure.speed import measure_speed
from outrider.measure.survey import Row, Shape, Variant, by_task, measure_acceptance
from outrider.record import Tally
from outrider.request import SamplingParams
from tests.cli.fakes import FakeLLM

PROMPTS = [Prompt(f"{task}:{i}", f"{task} {i}", task) for i in range(3) for task in ("qa", "rag")]


def tally(*delivered: int) -> Tally:
    made = Tally()
    for count in delivered:
        made.count(drafted=4, delivered=count)
    return made


def open_fake(settings):
    if settings["drafter"] == "untrained":
        raise ConfigError("no weights: run outrider train")
    llm = FakeLLM("m", dict(settings))
    llm.closed = False
    return llm


def test_tasks_keep_the_order_of_the_file_and_the_limit_is_each_tasks_own():
    assert {task: len(kept) for task, kept in by_task(PROMPTS, 2).items()} == {"qa": 2, "rag": 2}
    assert list(by_task(PROMPTS, None)) == ["qa", "rag"]


def test_mean_tau_is_the_mean_of_pooled_taus():
    """By hand: qa (1 + 3 + 5) / 3 = 3 tokens a cycle, rag 2; the mean of tasks is 2.5 though cycles pool to 2.75."""
    row = Row(Variant("x", 0.0), {"qa": tally(1, 3, 5), "rag": tally(2)})
    assert row.tau(["qa", "rag"]) == pytest.approx(2.5)
    assert row.pooled().tau == pytest.approx(11 / 4)


def test_rates_by_position_are_conditional():
    """By hand: of 4 cycles 3 accept the first guess, 2 of those the second, 1 of those the third and the fourth."""
    row = Row(Variant("x", 0.0), {"qa": tally(1, 2, 3, 5)})
    assert row.by_position() == pytest.approx([3 / 4, 2 / 3, 1 / 2, 1 / 1])


def test_fixed_shapes_are_not_left_to_control():
    settings = Variant("x", 0.0, shape=Shape(8, 4, 32)).settings()
    assert (settings["adaptive"], settings["depth"], settings["width"], settings["nodes"]) == (False, 8, 4, 32)
    assert "adaptive" not in Variant("x", 0.0).settings()


def test_a_drafter_that_cannot_be_built_gets_its_sentence_and_no_figure():
    variants = [Variant("untrained", 0.0), Variant("ngram", 1.0)]
    rows = measure_acceptance(open_fake, variants, by_task(PROMPTS, None), SamplingParams(max_tokens=4))
    assert rows[0].error == "no weights: run outrider train"
    assert rows[0].tallies == {}
    assert rows[1].error is None
    assert rows[1].tau(["qa", "rag"]) == pytest.approx(3.0)


def test_speed_is_told_by_task_against_plain_runs_of_the_same_prompts():
    rows = measure_speed(open_fake, [Variant("ngram", 0.0)], by_task(PROMPTS, 2), SamplingParams(max_tokens=4))
    mine, plain = rows[0].speeds["rag"]
    assert len(mine.runs) == len(plain.runs) == 2
    assert rows[0].to_json()["speed"]["qa"]["runs"] == 2


def test_an_engine_that_memory_left_narrower_passes_is_no_match():
    """Plain decoding is opened first, so that whoever comes last would run crippled, and flatter the others."""

    def open_ever_narrower(settings):
        llm = open_fake(settings)
        llm.resolved.memory = SimpleNamespace(max_rows=512 if settings["drafter"] == "none" else 128, graphs=0)
        return llm

    rows = measure_speed(open_ever_narrower, [Variant("ngram", 0.0)], by_task(PROMPTS, 2), SamplingParams(max_tokens=4))
    assert "passes of 128 rows" in rows[0].error
    assert rows[0].speeds == {}


def test_graphs_are_taken_before_anything_is_timed():
    """Each engine takes two, one an answer: its third answer takes none."""
    taken = []

    class Pipeline:
        num_captured = 0

    def open_counting(settings):
        llm = open_fake(settings)
        llm.engine.pipeline, generate = Pipeline(), llm.generate

        def counted(prompts, params, raw=False, watch=None):
            llm.engine.pipeline.num_captured = min(2, llm.engine.pipeline.num_captured + 1)
            taken.append(settings["drafter"])
            return generate(prompts, params, raw, watch)

        llm.generate = counted
        return llm

    measure_speed(open_counting, [Variant("ngram", 0.0)], by_task(PROMPTS, 2), SamplingParams(max_tokens=4))
    assert taken[:6] == ["none"] * 3 + ["ngram"] * 3


def test_tasks_come_from_the_file(tmp_path):
    file = tmp_path / "sets.jsonl"
    file.write_text(
        '{"turns": ["a"], "category": "roleplay"}\n{"turns": ["b"], "category": "rag"}\n{"question": "c"}\n'
    )
    assert [(p.content, p.task) for p in read_prompts(file)] == [("a", "conversation"), ("b", "rag"), ("c", "sets")]
