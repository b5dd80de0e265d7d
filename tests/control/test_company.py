"""Cycles in flight: whoever guesses, all have the rows of it, so that all guess together or nobody does."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.control.company import Bounds, Company, Together
from outrider.control.cost import PassCost
from outrider.control.depth import Control
from outrider.control.life import Life
from outrider.control.objective import Throughput
from outrider.control.prices import Prices
from outrider.record import Record, RequestCycle
from outrider.request import Request, SamplingParams

CARD = {1: 4.3e-3, 2: 4.4e-3, 4: 4.5e-3, 8: 4.7e-3, 16: 4.8e-3, 32: 5.3e-3, 64: 5.8e-3, 128: 8.1e-3, 256: 11.4e-3}
"""Seconds of a pass of an 8B by its rows on an H200 (docs/measurements.md)."""
LEVEL = 0.3e-3


def company_of(rates: list[float], cap: int = 8, others: int = 0, width: int = 1, nodes: int = 8) -> Company:
    return Company({n: (rate, cap) for n, rate in enumerate(rates)}, len(rates) + others, Bounds(width, nodes, 4096))


def by_hand(rates: list[float], depth: int, others: int = 0) -> float:
    """Tokens a second of chains of one depth for everyone."""
    count = len(rates) + others
    tokens = count + sum(rate**level for rate in rates for level in range(1, depth + 1))
    return tokens / PassCost(CARD).seconds(count * (1 + depth))


@pytest.mark.parametrize("rates", [[0.9], [0.9] * 8, [0.9, 0.1, 0.1, 0.1], [0.3] * 16, [0.7] * 40])
@pytest.mark.parametrize("others", [0, 5])
def test_the_depth_is_the_best_of_all_for_everyone(rates: list[float], others: int) -> None:
    prices = Prices(PassCost(CARD))
    found, saved = company_of(rates, others=others).best(prices, Throughput())
    assert (saved > 0) == (found > 0)
    speeds = [by_hand(rates, depth, others) for depth in range(9)]
    best = max(range(9), key=lambda depth: speeds[depth])
    assert found == (best if speeds[best] > 1.02 * speeds[0] else 0)


def test_one_likely_guess_does_not_make_seven_others_pay() -> None:
    """Its own rows would pay for themselves, those of a whole company do not."""
    prices = Prices(PassCost(CARD))
    for levels in range(1, 9):
        prices.aloft.drafting[False].learn(levels, LEVEL * levels)
    prices.flies = True
    prices.at(8, 8 * 256)
    assert company_of([0.75]).best(prices, Throughput())[0] > 0
    assert company_of([0.75] + [0.02] * 7, width=4, nodes=31).best(prices, Throughput())[0] == 0


def world(rate: float, count: int, cycles: int, width: int = 4) -> tuple[float, set[int]]:
    """Tokens a second over plain decoding's, and how many requests guessed in a cycle, where each level of a tree holds
    with chance `rate` and a cycle's rows are everybody's."""
    rng = random.Random(4)
    control, truth = Control(PassCost(CARD), depth=None, width=width, nodes=31), PassCost(CARD)
    requests = [Request(i, (1,), SamplingParams(), 0, limit=10**6) for i in range(count)]
    tokens = seconds = 0.0
    guessing = set()
    for _ in range(cycles):
        budgets = control.outlined(requests)
        guessing.add(len(budgets))
        deepest = max((budget.depth for budget in budgets.values()), default=0)
        nodes = Bounds(width, 31, 1 << 20).nodes_of(deepest, count) if deepest else 0
        done = []
        for request in requests:
            accepted, depth = 0, budgets[request.id].depth if request.id in budgets else 0
            while accepted < depth and rng.random() < rate:
                accepted += 1
            done.append(RequestCycle(request.id, nodes if depth else 0, depth, 1 + accepted, asked=bool(depth)))
            tokens += 1 + accepted
        took = truth.seconds(count * (1 + nodes)) + deepest * LEVEL
        seconds += took
        control.learn(Record(count * (1 + nodes), 0, tuple(done), 0, 0, 0, took, keys=count, overlaps=True))
    return tokens / seconds / (count / truth.seconds(count)), guessing


@pytest.mark.parametrize("count", [1, 8, 64])
@pytest.mark.parametrize(("rate", "least"), [(0.05, 0.98), (0.3, 0.97), (0.8, 0.98)])
def test_it_is_never_slower_and_all_guess_or_none(count: int, rate: float, least: float) -> None:
    found, guessing = world(rate, count, 1500)
    assert found >= least
    assert guessing <= {0, count}
    if rate == 0.8 and count < 64:
        assert found > 1.4


@pytest.mark.parametrize("count", [1, 3, 8, 32])
@pytest.mark.parametrize("most_rows", [256, 512])
def test_a_tree_is_priced_with_the_rows_that_fly(count: int, most_rows: int) -> None:
    for width in (1, 4, 8):
        company = Company({0: (0.8, 16)}, count, Bounds(width, 31, most_rows))
        for depth in range(1, company.most + 1):
            rows = count * (1 + company.bounds.nodes_of(depth, count))
            assert count * (depth + 1) <= rows <= most_rows
            assert width > 1 or rows == count * (depth + 1)
    assert Company({0: (0.8, 16)}, 300, Bounds(4, 31, 256)).best(Prices(PassCost(CARD)), Throughput()) == (0, 0.0)


def test_reading_is_tried_by_one_and_then_weighed_for_all() -> None:
    """A drafter with a stack of its own reads whole prompts before its first guess."""
    control = Control(PassCost(CARD), depth=4, width=1)
    requests = [Request(i, (1,) * 4000, SamplingParams(), 0, limit=5000) for i in range(8)]
    assert len(control.outlined(requests)) == 1, "nobody knows yet what reading costs"
    cycles = [RequestCycle(i, 0, 0, 1) for i in range(8)]
    cycles[0] = RequestCycle(0, 3, 3, 2, asked=True)
    took = 4.7e-3 + 4000 * 1e-3  # a second for a thousand tokens: never worth it
    control.learn(Record(32, 0, tuple(cycles), 0, 0, 0, took, keys=32, overlaps=True))
    assert control.prices.aloft.drafting[False].catch_up > 0
    plainly = (*cycles[1:], RequestCycle(0, 0, 0, 1))
    for _ in range(300):
        assert not control.outlined(requests)
        control.learn(Record(8, 0, plainly, 0, 0, 0, 4.7e-3, 8, overlaps=True))


def test_a_try_that_is_in_the_air_is_not_given_twice() -> None:
    together, prices = Together(), Prices(PassCost(CARD))
    lives = {0: Life(0, [0, 0])}
    given = [
        together.depths({0: (0.01, 8)}, lives, Bounds(1, 8, 512), prices, Throughput(), cycle)[0] for cycle in range(60)
    ]
    tried = [cycle for cycle, depths in enumerate(given) if depths]
    assert tried
    assert all(b - a > 1 for a, b in itertools.pairwise(tried))


def test_who_may_not_guess_is_told_to_by_nobody() -> None:
    control = Control(PassCost(CARD), depth=4, width=1, adaptive=False)
    params = [SamplingParams(), SamplingParams(speculation=False), SamplingParams(depth=2)]
    requests = [Request(i, (1,), each, 0, limit=100) for i, each in enumerate(params)]
    assert {number: budget.depth for number, budget in control.outlined(requests).items()} == {0: 4, 2: 2}
    nobody = Control(PassCost(CARD), depth=4, width=1)
    assert nobody.outlined(requests[1:2]) == {}
