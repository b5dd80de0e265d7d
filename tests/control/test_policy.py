"""Control over recorded texts: near the best that always asking or never asking gives, alone and in company."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.control.cost import PassCost
from outrider.control.depth import Control
from outrider.measure.simulate import ONE_CORE, TWO_CORES, Plain, Policy, Recorded, Simulation, World
from outrider.measure.traces import Trace, load_traces

TRACES = load_traces(Path(__file__).with_name("traces.jsonl.gz"))
"""SmolLM2-135M-Instruct, packed, and its `small_model`: the first prompt of eight tasks, greedy and at temperature 1,
seed 0, at most 160 tokens; by `measure/traces.record`.
"""
GREEDY = [trace for trace in TRACES if not trace.temperature]
DRAWN = [trace for trace in TRACES if trace.temperature]
WORLDS = pytest.mark.parametrize("world", [ONE_CORE, TWO_CORES], ids=["one core", "two cores"])


class Always(Control):
    """Asks whatever it costs; the drafter still stops where a node does not pay."""

    def __init__(self, world: World) -> None:
        cost = PassCost(world.cost.table(), world.cost.key, world.cost.row_key)  # which it will refine
        super().__init__(cost, None, Recorded.needs.width, ranks=True)

    def _affords(self, request_id: int, promises: bool) -> bool:
        return True


def ratios(world: World, traces: Sequence[Trace], policy: Policy | None = None) -> list[float]:
    """Of plain decoding's time to this policy's, text by text, one after the other."""
    plain, told = Simulation(world, Plain()).run(traces), Simulation(world, policy).run(traces)
    return [a.seconds / b.seconds for a, b in zip(plain, told, strict=True)]


def together(world: World, traces: Sequence[Trace], concurrency: int) -> float:
    """The ratio of all, so many at once."""
    plain, ours = Simulation(world, Plain()), Simulation(world)
    plain.run(traces, concurrency)
    ours.run(traces, concurrency)
    return plain.seconds / ours.seconds


@WORLDS
def test_no_text_is_slowed_down_and_little_is_left_lying(world: World) -> None:
    """Where always asking pays, so does this; where it does not, this costs next to nothing."""
    always = ratios(world, DRAWN, Always(world))
    ours = ratios(world, DRAWN)
    assert min(ours) >= 0.94  # one text alone may be the one that finds out for all
    assert statistics.fmean(ours) >= 0.97 * statistics.fmean(max(1.0, each) for each in always)
    assert statistics.fmean(min(1.0, each) for each in ours) >= 0.985


@WORLDS
def test_greedy_texts_gain_as_much_as_by_always_asking(world: World) -> None:
    always = ratios(world, GREEDY, Always(world))
    ours = ratios(world, GREEDY)
    assert min(ours) >= 0.98
    assert statistics.fmean(ours) >= 0.97 * statistics.fmean(always)


@WORLDS
@pytest.mark.parametrize("concurrency", [4, 16, 64])
def test_company_is_not_slowed_down(world: World, concurrency: int) -> None:
    """On a processor each row of a wide pass takes nearly as long as a token: guesses pay for few requests only."""
    traces = (DRAWN * 8)[: 4 * concurrency] if concurrency < 64 else DRAWN * 8
    assert together(world, traces, concurrency) >= 0.98


@WORLDS
def test_a_drafter_that_promises_and_is_always_wrong_costs_two_in_a_hundred(world: World) -> None:
    def lies(trace: Trace) -> Trace:
        moments = {p: tuple((token + 1, *rest) for token, *rest in nodes) for p, nodes in trace.moments.items()}
        return replace(trace, moments=moments)

    assert statistics.fmean(ratios(world, [lies(trace) for trace in DRAWN])) >= 0.98


def asked(cycles: Sequence[tuple[int, int, float]]) -> float:
    """The share of decoding requests that asked for guesses."""
    return sum(asks for _, asks, _ in cycles) / sum(live for live, _, _ in cycles)


@WORLDS
def test_a_rush_is_met_without_oscillation(world: World) -> None:
    """Guesses end with its first cycles, do not flicker while it lasts, and return behind it."""
    traces = (GREEDY * 20)[:150]

    def rush(begun: int) -> int:
        return 64 if 4 <= begun < 140 else 1

    plain, ours = Simulation(world, Plain()), Simulation(world)
    plain.run(traces, rush)
    ours.run(traces, rush)
    busy = [index for index, (live, _, _) in enumerate(ours.cycles) if live >= 32]
    alone = [cycle for cycle in ours.cycles[busy[-1] :] if cycle[0] == 1]
    assert asked(ours.cycles[busy[0] + 8 : busy[-1]]) <= 0.005
    assert sum(asks > 3 for _, asks, _ in ours.cycles[busy[0] : busy[-1]]) <= 2
    assert asked(alone[:60]) >= 0.5
    assert asked(alone[60:]) >= 0.6
    assert plain.seconds / ours.seconds >= 1.0


@pytest.mark.slow
@WORLDS
def test_thousands_of_requests_are_never_slowed_down(world: World) -> None:
    """Texts of all temperatures in turn, by 1, 3, 9 and 40 at once."""
    traces = TRACES * 190

    def load(begun: int) -> int:
        return (1, 3, 9, 40)[begun // 100 % 4]

    plain, ours = Simulation(world, Plain()), Simulation(world)
    plain.run(traces, load)
    ours.run(traces, load)
    assert len(traces) >= 3000
    assert plain.seconds / ours.seconds >= 1.02
