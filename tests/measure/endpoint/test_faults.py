"""Mutation tests of the checker: every fault planted in a server is found, and a sound server is never accused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest

from outrider.measure.endpoint import drawn, ends, shapes, texts
from outrider.measure.endpoint.examine import examine
from outrider.measure.endpoint.findings import Finding, Report, judged
from outrider.measure.endpoint.plan import Plan
from outrider.measure.endpoint.subject import Subject, meet
from outrider.measure.prompts import BUILT_IN
from tests.measure.endpoint.double import FAULTS, Double

QUICK = Plan(draws=48, max_tokens=48)
TRIALS = {trial.name: trial for trial in drawn.TRIALS}
FINDERS: dict[str, Callable[[Subject], Awaitable[Finding]]] = {
    "temperature ignored": lambda subject: drawn.drawn(subject, TRIALS["temperature"]),
    "min_p ignored": lambda subject: drawn.drawn(subject, TRIALS["min_p"]),
    "top_p ignored": lambda subject: drawn.drawn(subject, TRIALS["top_p"]),
    "penalty by cycle": lambda subject: texts.penalised(subject, "frequency_penalty"),
    "penalty ignored in guesses": lambda subject: texts.penalised(subject, "presence_penalty"),
    "end overrun": ends.own_end,
    "rollback off by one": texts.reread,
    "usage miscounted": ends.usage,
    "stop string leaked": ends.stops,
    "stream loses a chunk": shapes.streams,
    "choices share noise": shapes.choices,
    "bias at the first token only": shapes.bias,
    "limit overrun": ends.limits,
    "log-probabilities of another row": texts.likeliest,
    "neighbours mixed up": texts.together,
}
NAMED = (
    "wrong residual",
    "shared noise",
    "temperature ignored",
    "min_p ignored",
    "penalty by cycle",
    "end overrun",
    "rollback off by one",
    "usage miscounted",
    "stop string leaked",
    "stream loses a chunk",
)
"""Ten kinds that engines have shipped with, which are to be found within minutes."""
BESIDE = ("another model",)
"""Of a fault that only a reference shows."""
BY_LAW = ("wrong residual", "shared noise")
"""Faults that only many draws show."""


async def find(fault: str | None, test: Callable[[Subject], Awaitable[Finding]]) -> Finding:
    endpoint = Double(fault).endpoint()
    try:
        return judged([await test(await meet(endpoint, BUILT_IN[:4], QUICK))])[0]
    finally:
        await endpoint.close()


async def whole(
    fault: str | None,
    plan: Plan,
    prompts: Sequence[str] = BUILT_IN,
    beside: bool = False,
    begin: Callable[[Double, str], None] = lambda double, power: None,
) -> Report:
    """A whole check, alone or beside a sound server."""
    double = Double(fault)
    endpoint, reference = double.endpoint(), Double().endpoint() if beside else None
    try:
        return await examine(endpoint, prompts, plan, reference, lambda power: begin(double, power))
    finally:
        await endpoint.close()
        if reference is not None:
            await reference.close()


def test_every_fault_has_its_finder() -> None:
    assert {*FINDERS, *BY_LAW, *BESIDE} == {*FAULTS}


@pytest.mark.parametrize("fault", FINDERS)
def test_a_fault_is_found_by_the_test_that_is_meant_for_it(fault) -> None:
    sound = asyncio.run(find(None, FINDERS[fault]))
    assert (sound.status, sound.count > 0) == ("held", True), sound
    found = asyncio.run(find(fault, FINDERS[fault]))
    assert found.status == "broken"
    assert found.said
    assert found.remedy


def test_a_whole_check_tells_of_all_tests_and_of_its_power_before_it_draws() -> None:
    said: list[str] = []

    def begin(double: Double, power: str) -> None:
        assert double.drawn < 20
        said.append(power)

    plan = Plan(draws=48, max_tokens=24, draw_tokens=6)
    report = asyncio.run(whole(None, plan, BUILT_IN[:2], begin=begin))
    assert report.broken == []
    assert said == [report.power]
    assert "total variation" in report.power
    names = [finding.name for finding in report.findings]
    assert {"max_tokens", "stop", "usage", "stream", "seed", "n", "logprobs", "logit_bias"} <= {*names}
    assert {f"{trial.name}: law" for trial in drawn.TRIALS if trial.fields} <= {*names}
    assert len(names) == len({*names}) == sum(report.counts().values())
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["held"] == report.counts()["held"]


@pytest.mark.parametrize("fault", [None, "another model"])
def test_beside_a_reference_another_model_is_found(fault) -> None:
    """It is consistent in itself, so that alone nothing is wrong with it."""
    plan = Plan(draws=80, max_tokens=16, draw_tokens=3)
    report = asyncio.run(whole(fault, plan, BUILT_IN[:1], beside=True))
    compared = {"greedy: against the reference", "repetition_penalty: law", "logprobs: against the reference"}
    status = {finding.name: finding.status for finding in report.findings}
    assert {name: status[name] for name in compared} == dict.fromkeys(compared, "broken" if fault else "held")
    assert {finding.name for finding in report.broken} - compared <= {f"{trial}: law" for trial in TRIALS}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_fault_is_found_with_the_default_settings_in_minutes() -> None:
    """Seconds of the processor, the tested server's own among them: the clock would count what else runs."""
    began = time.process_time()
    for fault in NAMED:
        assert asyncio.run(whole(fault, Plan())).broken, fault
    assert time.process_time() - began < 300
    for fault in {*FAULTS} - {*NAMED, *BESIDE}:
        assert asyncio.run(whole(fault, Plan())).broken, fault


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_checks_of_a_sound_server_raise_no_alarm() -> None:
    for seed in range(20):
        report = asyncio.run(whole(None, Plan(seed=1000 * seed)))
        assert [finding.name for finding in report.broken] == [], seed
        assert report.counts()["untested"] == 0
