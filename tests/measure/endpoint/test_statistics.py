"""The statistics keep their promises: uniform p-values without a fault, power with one, bounds that hold."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.measure.endpoint.laws import Law
from outrider.measure.endpoint.statistics import (
    ALPHA,
    Draw,
    by_rank,
    distance,
    holm,
    least_seen,
    martingale,
    serial,
    shared_laws,
    two_samples,
)

TOKENS = "abcdefgh"


def laws(rng, count):
    rows = rng.dirichlet(np.full(len(TOKENS), 0.7), size=count)
    out = []
    for row in rows:
        order = np.argsort(-row)
        known = {TOKENS[i]: float(row[i]) for i in order[:6]}
        out.append(Law(known, float(max(0.0, 1 - sum(known.values())))))
    return out


def draws_of(rng, law, history, count, power):
    chances = np.array([*law.known.values(), law.tail]) ** power
    tokens = rng.choice([*law.known, "tail"], size=count, p=chances / chances.sum())
    return [Draw(history, str(token), law) for token in tokens]


def many(seed, power=1.0, histories=20, each=50, of=0):
    """Draws of laws that are the same for one `of`, sharpened by a power."""
    rng = np.random.default_rng(seed)
    drawn = [
        draws_of(rng, law, (0, (str(number),)), each, power)
        for number, law in enumerate(laws(np.random.default_rng(of), histories))
    ]
    return [draw for part in drawn for draw in part]


STATISTICS = {
    "shared": lambda draws: shared_laws(draws)[0],
    "tokens": martingale,
    "grouped": lambda draws: martingale(draws, lambda draw: draw.history),
    "ranks": lambda draws: martingale(map(by_rank, draws)),
    "neighbours": lambda draws: serial([draws]),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_sound_draws_have_uniform_p_values(name) -> None:
    ps = np.array([STATISTICS[name](many(seed, of=seed)).p for seed in range(1, 21)])
    assert 0.3 < ps.mean() < 0.7
    assert (ps < 0.05).mean() < 0.2
    assert ps.min() > 1e-4


@pytest.mark.parametrize("name", ["shared", "grouped", "ranks"])
def test_a_law_that_is_too_sharp_is_found(name) -> None:
    assert STATISTICS[name](many(1, power=1.6)).p < 1e-6


def test_draws_that_hang_on_the_one_before_are_found() -> None:
    rng, law = np.random.default_rng(0), Law({"a": 0.5, "b": 0.5}, 0.0)
    tokens, texts = "ab", []
    last = 0
    for _ in range(2000):
        last = last if rng.random() < 0.6 else 1 - last
        texts.append(Draw((0, ()), tokens[last], law))
    assert serial([texts]).p < 1e-6
    assert martingale(texts).p > 1e-3


def test_two_servers_of_one_law_and_of_two() -> None:
    one, same, other = (
        [(d.history, d.token) for d in many(seed, power, histories=10, each=each)]
        for seed, power, each in ((1, 1.0, 300), (2, 1.0, 200), (3, 1.6, 300))
    )
    assert two_samples(one, same).p > 1e-3
    assert two_samples(one, other).p < 1e-6


def test_few_draws_are_no_test() -> None:
    draws = many(1, histories=3, each=2)
    score, rest = shared_laws(draws)
    assert (score.df, score.p, rest) == (0, 1.0, draws)
    assert martingale([]).p == 1.0
    assert distance([]) is None


def test_the_bounds_of_total_variation_hold() -> None:
    for seed in range(1, 9):
        found = distance(many(seed))
        assert found.low == 0.0
        assert 0 < found.measured < found.high
    assert distance(many(1, power=3.0)).low > 0


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({}) == {}


def test_the_power_that_is_stated_is_there() -> None:
    """A shift of just the stated size, spread as badly as can be: found in nine of ten cases."""
    count, df = 400, 7
    shift = least_seen(count, df, num_tests=1)
    law = Law(dict.fromkeys(TOKENS, 1 / 8), 0.0)
    chances = np.array([1 / 8 + shift / 4 * (1 if i % 2 else -1) for i in range(8)])
    found = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        tokens = rng.choice(list(TOKENS), size=count, p=chances)
        found += shared_laws([Draw((0, ()), str(token), law) for token in tokens])[0].p < ALPHA
    assert found >= 82
    assert least_seen(4 * count, df, 1) == pytest.approx(shift / 2)
