"""The check finds every difference it is shown, counts it once, and pools its figures as quotients of sums."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import ConfigError, RequestError
from outrider.measure.lossless import Comparison, check
from outrider.measure.prompts import Prompt
from outrider.record import Tally
from outrider.request import SamplingParams, TokenLogprob

PROMPTS = [Prompt(name, name) for name in ("a", "b", "c")]


@dataclass
class Result:
    token_ids: tuple[int, ...]
    tally: Tally
    text: str = ""
    finish_reason: str = "length"
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


@dataclass
class Engine:
    """Says 0, 1, 2, ... to any prompt; `spoil` may change a result, given drafter, prompt and batch size."""

    drafter: str
    spoil: Any
    runs: list[tuple[str, int]] = field(default_factory=list)
    closed: bool = False

    def always_guessing(self) -> Any:
        return nullcontext()

    def generate(self, prompts: Any, params: Any, raw: bool = False) -> list[Result]:
        many = [prompts] if isinstance(prompts, str) else prompts
        each = params if isinstance(params, list) else [params] * len(many)
        return [self._one(prompt, wanted, len(many)) for prompt, wanted in zip(many, each, strict=True)]

    def _one(self, prompt: str, params: SamplingParams, batch: int) -> Result:
        self.runs.append((prompt, params.seed))
        tally = Tally()
        if self.drafter != "none":
            tally.count(drafted=4, delivered=3)
            tally.count(drafted=4, delivered=1)
        ids = tuple(range(params.max_tokens))
        rows = tuple(TokenLogprob(i, -0.1, ((i, -0.1), (i + 1, -0.6))) for i in ids) if params.logprobs else None
        result = Result(ids, tally, logprobs=rows)
        self.spoil(self.drafter, prompt, batch, result)
        return result

    def close(self) -> None:
        self.closed = True


def compare(spoil=lambda *about: None, drafters=("x",), **settings):
    opened = []

    def open_llm(drafter):
        opened.append(Engine(drafter, spoil))
        return opened[-1]

    report = check(open_llm, drafters, PROMPTS, max_tokens=4, **settings)
    assert all(engine.closed for engine in opened)
    return report, opened


def test_equal_texts():
    seen = []
    report, opened = compare(drafters=("x", "y"), temperatures=(0.0, 1.0), seed=5, progress=lambda *at: seen.append(at))
    assert (report.compared, report.differing) == (3 * 2 * 2, 0)
    assert report.to_json()["first_difference"] is None
    assert [engine.drafter for engine in opened] == ["none", "x", "y"]
    assert seen[-1] == (32, 32)
    # Prompt i has seed 5 + i, in the warm-up, alone and in the batch; the first runs once more to warm up.
    once = [("a", 5), ("b", 6), ("c", 7)]
    assert opened[1].runs == [*once, ("a", 5), *once, *once] * 2
    assert opened[0].runs[: len(opened[1].runs)] == opened[1].runs


def test_the_warm_up_is_not_timed_and_the_same_for_both(monkeypatch):
    clock = iter(range(10_000))
    asked = {"plain": 0}

    def spoil(who, prompt, size, result):
        asked["plain"] += who == "none"

    monkeypatch.setattr("outrider.measure.lossless.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    report, _ = compare(spoil)
    (found,) = report.comparisons
    assert (found.plain_tokens, found.tokens, found.plain_seconds, found.seconds) == (12, 12, 3.0, 3.0)
    assert asked["plain"] == 3 + 1 + 3 + 3  # prompts read, the first in full, alone, and in the batch


@pytest.mark.parametrize(("batch", "drafter", "mode"), [(1, "x", "solo"), (3, "x", "batch"), (3, "none", "batch")])
def test_a_difference_anywhere_is_found(batch, drafter, mode):
    def spoil(who, prompt, size, result):
        if (who, prompt, size) == (drafter, "b", batch):
            result.token_ids = (0, 1, 7, 3)

    report, _ = compare(spoil)
    assert (report.compared, report.differing) == (3, 1)
    first = report.to_json()["first_difference"]
    assert (first["prompt"], first["mode"], first["drafter"]) == ("b", mode, drafter)
    assert (first["position"], first["plain"], first["other"]) == (2, 2, 7)
    assert first["margin"] == pytest.approx(0.5)


def test_batched_runs_alone_find_a_difference_too():
    def spoil(who, prompt, size, result):
        if (who, prompt, size) == ("x", "b", 3):
            result.token_ids = (0, 1, 7, 3)

    report, _ = compare(spoil, batched=True)
    assert (report.compared, report.differing) == (3, 1)
    assert report.to_json()["ratio"] is None
    assert report.comparisons[0].differences[0].mode == "batch"


def test_a_shorter_text_and_another_end_are_differences():
    def shorter(who, prompt, size, result):
        if who == "x" and prompt == "a":
            result.token_ids = (0, 1)

    def other_end(who, prompt, size, result):
        if who == "x" and prompt == "a":
            result.finish_reason = "stop"

    first = compare(shorter)[0].to_json()["first_difference"]
    assert (first["position"], first["plain"], first["other"]) == (2, 2, None)
    first = compare(other_end)[0].to_json()["first_difference"]
    assert (first["position"], first["plain"], first["other"], first["margin"]) == (4, None, None, None)


def test_a_prompt_refused_by_both_is_not_compared():
    def spoil(who, prompt, size, result):
        if prompt == "b":
            raise RequestError("too long")

    report, _ = compare(spoil)
    assert (report.compared, report.differing) == (2, 0)
    assert report.comparisons[0].refusals == ["too long"]


def test_a_prompt_refused_by_one_is_a_difference():
    def spoil(who, prompt, size, result):
        if who == "x" and prompt == "b":
            raise RequestError("too long")

    report, _ = compare(spoil)
    assert (report.compared, report.differing) == (3, 1)


def test_figures_are_pooled():
    report, _ = compare()
    assert report.to_json()["tau"] == 1 + (2 + 0) / 2
    a = Comparison("x", 0.0, plain_tokens=10, plain_seconds=2.0, tokens=10, seconds=1.0)
    assert (a.plain_rate, a.rate, a.ratio) == (5.0, 10.0, 2.0)
    assert Comparison("x", 0.0).ratio is None


def test_nothing_to_compare_is_refused():
    with pytest.raises(ConfigError, match="nothing to compare"):
        check(lambda name: None, [], PROMPTS)
