"""What is known of costs: monotone, by rows, requests and keys, refined by what comes by, kept for the next start."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from outrider.control.cost import CONTEXT, Load, PassCost, isotonic
from outrider.control.draft_cost import DraftCost
from outrider.control.prices import Prices
from outrider.record import Record, RequestCycle

TABLE = {1: 4.3e-3, 2: 4.6e-3, 4: 5.6e-3, 8: 8.1e-3, 16: 14.8e-3}


@given(st.lists(st.floats(0, 100), max_size=12))
def test_the_nearest_rising_sequence_is_scipys(values: list[float]) -> None:
    assert isotonic(values) == pytest.approx(isotonic_regression(values).x if values else [])


def machine(load: Load, pace: float = 1.0) -> float:
    keys = CONTEXT * load.rows if load.keys is None else load.keys
    truth = PassCost(TABLE, key=1e-7, request=2e-5)
    return pace * truth.seconds(load.rows, load.requests, keys)


def test_keys_and_requests_are_priced_at_start() -> None:
    cost = PassCost.measure(machine, tuple(TABLE), clock=lambda: 0.0)
    assert cost.key == pytest.approx(1e-7)
    assert cost.request == pytest.approx(2e-5)
    for load in (Load(1, 1, 2000), Load(4, 4, 4 * 100), Load(12, 3, 12 * 1000)):
        assert cost.seconds(load.rows, load.requests, load.keys) == pytest.approx(machine(load))
        rows = [load.rows, 2 * load.rows]
        many = cost.many(np.array(rows), load.requests, load.keys)
        assert many[0] == pytest.approx(machine(load))
        assert many[1] == pytest.approx(machine(Load(rows[1], load.requests, 2 * (load.keys or 0))))


def test_a_cycle_is_predicted_within_a_tenth() -> None:
    """A machine that is a fifth slower than at start and wavers, at widths between the knots: medians."""
    cost, rng = PassCost.measure(machine, tuple(TABLE), clock=lambda: 0.0), random.Random(1)
    errors = []
    for cycle in range(600):
        load = Load(rng.randint(1, 14), 1, rng.randint(100, 3000))
        seconds = machine(load, 1.2) * rng.uniform(0.95, 1.05) * (5 if cycle % 50 == 0 else 1)
        if cycle >= 100:
            errors.append(abs(cost.seconds(load.rows, 1, load.keys) / seconds - 1))
        cost.learn(seconds, load.rows, 1, load.keys)
    assert sorted(errors)[len(errors) // 2] < 0.1


@pytest.mark.parametrize(("pace", "steep", "kept"), [(1.0, 0, True), (1.4, 0, True), (1.0, 1, False), (4.0, 0, False)])
def test_kept_prices_serve_while_they_hold(pace: float, steep: int, kept: bool) -> None:
    """Two passes are run to compare; a slower machine of the same shape is taken over at its pace."""
    told, runs = PassCost(TABLE).to_json(), []

    def run(load: Load) -> float:
        runs.append(load.rows)
        return pace * TABLE[load.rows] * (load.rows**0.5 if steep else 1)

    cost = PassCost.measure(run, tuple(TABLE), far=0, kept=told, clock=lambda: 0.0)
    assert (set(runs) == {1, 8}) is kept
    assert cost.seconds(8) == pytest.approx(pace * TABLE[8] * (8**0.5 if steep else 1))


def test_a_level_for_more_requests_is_dearer() -> None:
    cost, rng = DraftCost(), random.Random(2)
    for _ in range(400):
        levels, asks = rng.randint(1, 6), rng.choice((1, 1, 4, 16))
        cost.learn(levels, levels * (0.5e-3 + 0.1e-3 * (asks - 1)), asks)
    for asks in (1, 8, 16):
        assert cost.seconds(4, asks) == pytest.approx(4 * (0.5e-3 + 0.1e-3 * (asks - 1)), rel=0.1)
    assert cost.seconds(0, 4) == 0.0


def test_prices_survive_a_restart() -> None:
    prices = Prices(PassCost(TABLE, 1e-7, 2e-5), 2)
    for levels in (1, 2, 4, 8, 4, 2, 1, 3):
        done = RequestCycle(0, levels, levels, 2, None, True, 1)
        draft = 1e-3 + levels * 0.5e-3
        prices.learn(Record(1 + levels, 0, (done,), draft, 5e-3, 0.0, 5e-3 + draft, keys=200), [done], 0)
    again = Prices.from_json(prices.to_json())
    assert again.cost.table() == pytest.approx(prices.cost.table())
    for levels in (1, 4, 8):
        assert again.drafting[1].seconds(levels) == pytest.approx(prices.drafting[1].seconds(levels))


def test_what_was_lost_is_what_was_measured() -> None:
    """Not what the model says: twice the expected time is twice the loss, but a stall is not a guess's fault."""
    prices = Prices(PassCost(TABLE))
    done = RequestCycle(0, 3, 3, 1, None, True)
    for _ in range(40):
        prices.learn(Record(4, 0, (done,), 1.5e-3, TABLE[4], 0.0, TABLE[4] + 1.5e-3), [done], 0)
    plain = prices.cost.seconds(1)
    lost = {}
    for name, total in (("as expected", TABLE[4] + 1.5e-3), ("slow", 10e-3), ("stall", 500e-3)):
        ((_, (lost[name], reading)),) = prices.losses(Record(4, 0, (done,), 0, 0, 0, total), [done], {}).items()
        assert reading == 0.0
    assert lost["as expected"] == pytest.approx((TABLE[4] + 1.5e-3 - plain) / plain, rel=0.05)
    assert lost["slow"] == pytest.approx((10e-3 - plain) / plain, rel=0.05)
    assert lost["stall"] < 3.5 * lost["as expected"]
