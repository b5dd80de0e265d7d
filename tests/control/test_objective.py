"""What guesses are chosen by: all tokens, the mean wait of each request, or those that come at a pace."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.control.choice import Choice, best
from outrider.control.cost import PassCost
from outrider.control.objective import Expected, Goodput, Latency, Objective, Throughput, objective_of
from outrider.control.prices import Prices
from outrider.errors import ConfigError

STEEP = {1: 10e-3, 2: 11e-3, 4: 14e-3, 8: 22e-3, 16: 40e-3}


def value(name: str, tokens: list[float], seconds: float, pace: float) -> float:
    """By the definitions of config.py, request by request."""
    if name == "throughput":
        return sum(tokens) / seconds
    if name == "latency":  # so many requests at the mean wait for a token
        return len(tokens) / (sum(seconds / each for each in tokens) / len(tokens))
    return sum(min(each / seconds, pace) + 0.05 * max(0.0, each / seconds - pace) for each in tokens)


requests = st.lists(st.lists(st.floats(0.02, 0.98), max_size=3), min_size=1, max_size=4)


@given(requests, st.sampled_from(["throughput", "latency", "goodput"]), st.floats(10, 300))
def test_expected_values_are_those_of_the_definition(chances: list[list[float]], name: str, pace: float) -> None:
    expected = Expected(len(chances))
    for number, levels in enumerate(chances):
        for chance in itertools.accumulate(levels, lambda a, b: a * b):
            expected.add(number, chance)
    tokens = [1 + sum(itertools.accumulate(levels, lambda a, b: a * b)) for levels in chances]
    found = objective_of(name, pace).value(expected, 0.01)
    assert math.isclose(found, value(name, tokens, 0.01, pace), rel_tol=1e-9)


@given(requests, st.sampled_from(["throughput", "latency"]))
def test_what_is_taken_is_near_the_best_of_all_depths(chances: list[list[float]], name: str) -> None:
    """Against every combination of depths; best-first misses steps of the cost by little."""
    prices = Prices(PassCost(STEEP))
    paths = [list(itertools.accumulate(levels, lambda a, b: a * b)) for levels in chances]
    choices = [
        Choice(number, chance, 1, at, at, True)
        for number, path in enumerate(paths)
        for at, chance in enumerate(path, start=1)
    ]
    taken, _ = best(choices, len(paths), prices, objective_of(name))

    def of(depths: tuple[int, ...]) -> float:
        rows = len(paths) + sum(depths)
        tokens = [1 + sum(path[:depth]) for path, depth in zip(paths, depths, strict=True)]
        return value(name, tokens, prices.cycle(rows), 1.0)

    depths = tuple(sum(choice.request_id == number for choice in taken) for number in range(len(paths)))
    most = max(of(each) for each in itertools.product(*(range(len(path) + 1) for path in paths)))
    assert of(depths) >= most / 1.03


def taken_by(objective: Objective, rates: tuple[float, float]) -> list[int]:
    """Rows of two requests whose levels hold with these chances."""
    choices = [
        Choice(number, rate**level, 1, level, level, True) for number, rate in enumerate(rates) for level in range(1, 9)
    ]
    taken, _ = best(choices, 2, Prices(PassCost(STEEP)), objective)
    return [sum(choice.request_id == number for choice in taken) for number in range(2)]


def test_latency_gives_rows_to_who_gets_little() -> None:
    sure, unsure = taken_by(Throughput(), (0.95, 0.5))
    fair_sure, fair_unsure = taken_by(Latency(), (0.95, 0.5))
    assert sure >= fair_sure
    assert fair_unsure > unsure


def test_a_pace_that_all_keep_plainly_makes_speed_worth_little_and_one_that_nobody_keeps_all() -> None:
    assert taken_by(Goodput(10_000.0), (0.9, 0.9)) == taken_by(Throughput(), (0.9, 0.9))
    slow, quick = taken_by(Goodput(120.0), (0.95, 0.5))
    assert quick > taken_by(Throughput(), (0.95, 0.5))[1]  # who is behind comes first
    assert slow > 0


@pytest.mark.parametrize(
    "settings", [{"pace": 20.0}, {"objective": "goodput"}, {"objective": "goodput", "pace": 0.0}, {"objective": "best"}]
)
def test_a_wrong_objective_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"pace|objective"):
        EngineConfig.of(model="m", **settings)
