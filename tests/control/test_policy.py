"""Control over recorded texts, without a model: never much slower than the best fixed setting, and no flutter."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from outrider.control.choice import Aim, Offer, choose, hopeless
from outrider.control.cost import PassCost
from outrider.control.depth import Control
from outrider.control.offers import Member
from outrider.control.prices import Prices
from outrider.measure.simulate import FLAT, TWO_CORES, Drafting, Fixed, World, ramp, simulate
from outrider.measure.traces import Trace, load_traces

TRACES = load_traces(Path(__file__).parent / "traces.jsonl")
"""Three prompts of each of Spec-Bench's tasks, HumanEval and GSM8K at T = 1 and 0, by SmolLM2-135M, `ngram+eagle3`."""
DEAR = replace(TWO_CORES, drafting=(TWO_CORES.drafting[0], Drafting(0.8e-3, 1.1e-3, 0.1e-3, 0.05e-3)))
"""Where the head takes twice as long, it does not pay at T = 1."""
FIXED = [Fixed(), *(Fixed(0, depth=depth) for depth in (2, 8)), *(Fixed(1, depth=depth) for depth in (2, 4, 8))]


def auto(world: World, aim: Aim = Aim()) -> Control:  # noqa: B008
    members = [Member(width=1), Member(ranks=True)]
    return Control(Prices(PassCost(world.passes), 2), 16, 4, 32, members=members, aim=aim)


def texts(count: int, task: str | None = None, temperature: float | None = None) -> list[Trace]:
    chosen = [t for t in TRACES if task in (None, t.task) and temperature in (None, t.temperature)]
    chosen *= -(-count // len(chosen))
    random.Random(0).shuffle(chosen)
    return chosen[:count]


def best_fixed(traces: list[Trace], world: World, clients: int = 1) -> float:
    return max(simulate(fixed, traces, world, lambda _: clients).rate for fixed in FIXED)


def test_the_traces_are_whole() -> None:
    assert len(TRACES) == 48
    assert {trace.arms for trace in TRACES} == {("ngram", "eagle3")}
    for trace in TRACES:
        assert Trace.from_json(trace.to_json()) == trace
        assert all(moment.hits <= moment.levels <= moment.nodes for each in trace.moments for moment in each)


@pytest.mark.parametrize("world", [TWO_CORES, DEAR, FLAT], ids=["two cores", "dear head", "flat"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_request_at_a_time_is_as_fast_as_the_best_fixed_setting(world: World, temperature: float) -> None:
    traces = texts(72, temperature=temperature)
    assert simulate(auto(world), traces, world).rate >= 0.98 * best_fixed(traces, world)


@pytest.mark.parametrize("task", ["summarization", "translation", "rag"])
def test_texts_that_hardly_pay_cost_nothing_either(task: str) -> None:
    """T = 1 and long prompts, which a head must read before it can guess: against plain decoding."""
    traces = texts(72, task, 1.0)
    assert simulate(auto(DEAR), traces, DEAR).rate >= 0.98 * simulate(Fixed(), traces, DEAR).rate


@pytest.mark.parametrize("clients", [4, 16, 64])
def test_many_clients_are_no_slower_than_plain(clients: int) -> None:
    traces = texts(6 * clients, temperature=1.0)
    policy = auto(TWO_CORES)
    run = simulate(policy, traces, TWO_CORES, lambda _: clients)
    assert run.rate >= 0.98 * simulate(Fixed(), traces, TWO_CORES, lambda _: clients).rate


def test_a_ramp_of_clients_makes_nothing_flutter() -> None:
    """1 to 64 and back: all guess while few run, next to nobody while many do, on the way down as on the way up."""
    traces, steps = texts(900, "math_reasoning", 0.0), 60
    run = simulate(auto(TWO_CORES), traces, TWO_CORES, ramp(64, steps))
    shares = [sum(map(bool, run.asked[at : at + steps])) / steps for at in range(0, 13 * steps, steps)]
    assert min(shares[0], shares[-1]) > 0.95
    assert min(shares[1], shares[-2]) > 0.4
    assert max(shares[4:9]) < 0.12
    while_many = [bool(asked) for asked in run.asked[4 * steps : 9 * steps]]
    assert sum(a != b for a, b in pairwise(while_many)) < 0.12 * len(while_many)


def test_thousands_of_requests_take_seconds() -> None:
    run = simulate(auto(TWO_CORES), texts(2000), TWO_CORES, lambda _: 64)
    assert len(run.ends) == 2000
    assert run.tokens == sum(tokens - 1 for _, tokens, _ in run.ends)


def test_the_aim_is_what_is_served() -> None:
    """A deadline that only cycles with few guesses keep is kept, at the price of tokens a second."""
    traces, clients = texts(240, temperature=0.0), 4
    fast = simulate(auto(TWO_CORES), traces, TWO_CORES, lambda _: clients)
    aim = Aim("goodput", deadline=1.15 * TWO_CORES.passes[4])
    kept = simulate(auto(TWO_CORES, aim), traces, TWO_CORES, lambda _: clients)
    late = [sum(wait > aim.deadline for wait in run.waits) / len(run.waits) for run in (fast, kept)]
    assert late[1] < late[0]


def offers(*chances: float) -> list[Offer]:
    """Of requests 0, 1, ...: one level each, with these chances."""
    return [Offer(number, chance, 1, 1, 1, 0) for number, chance in enumerate(chances)]


def test_rows_go_where_they_are_worth_most() -> None:
    """Best-first over requests: the third row would cost more than the fourth request's chance brings."""
    prices = Prices(PassCost({4: 10.0, 6: 11.0, 8: 30.0}))
    chosen = choose(offers(0.2, 0.9, 0.3, 0.8), [0, 1, 2, 3], None, prices, Aim(), 1.02)
    assert set(chosen.offers) == {1, 3}
    assert chosen.speed == pytest.approx((4 + 1.7) / 11)
    assert chosen.worth == pytest.approx(chosen.speed / (4 / 10))
    assert not choose(offers(0.2, 0.1), [0, 1], None, Prices(PassCost({2: 1.0, 3: 1.5, 4: 2.0})), Aim(), 1.02).offers


def test_latency_looks_at_the_slowest() -> None:
    """A second level for one request brings more tokens in all; each other's first level brings it forward more."""
    prices = Prices(PassCost({2: 10.0, 3: 10.2, 4: 12.4}))
    deep = [Offer(0, 0.9, 1, 1, 1, 0), Offer(0, 0.8, 1, 2, 2, 0)]
    fast = choose(deep, [0, 1], None, prices, Aim("throughput"), 1.0)
    even = choose(deep, [0, 1], None, prices, Aim("latency"), 1.0)
    assert (fast.offers[0].depth, even.offers[0].depth) == (2, 1)


def test_nobody_is_asked_where_no_guess_could_pay() -> None:
    steep, flat = PassCost({1: 1.0, 64: 64.0}), PassCost({1: 1.0, 64: 1.1})
    assert hopeless(8, 8, None, steep, 1.02)
    assert not hopeless(8, 8, None, flat, 1.02)
