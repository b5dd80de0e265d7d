"""Which guesses of all requests to take together, so that the pass promises most of what is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.control.objective import Expected, Objective
from outrider.control.prices import Prices

ADVANTAGE = 1.02
"""Guessing must promise this much more than plain decoding: a promise is noisier than plain decoding's price."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Something that may be added to a pass: `tokens` more are expected of `rows` more rows, `levels` deep; `graded` as
    the price of a level is."""

    request_id: int
    tokens: float
    rows: float
    levels: float
    depth: int
    graded: bool


def best(choices: Sequence[Choice], count: int, prices: Prices, objective: Objective) -> tuple[list[Choice], float]:
    """Those that are taken, none where plain decoding promises as much, and the tokens a second that they promise.

    Best-first by gain a row; every number of them is weighed, as costs rise in steps.

    Args:
        choices: those of one request stand in the order in which they build on each other. count: of all that decode.
    """
    if not count:
        return [], 0.0
    seconds = prices.cycle(count)
    expected = Expected(count)
    plain = most = objective.value(expected, seconds)
    speed, taken, rows = count / seconds, 0, float(count)
    deepest: dict[bool, float] = {}
    ranked = _ranked(choices, objective, seconds)
    for number, choice in enumerate(ranked, start=1):
        expected.add(choice.request_id, choice.tokens)
        rows += choice.rows
        deepest[choice.graded] = max(deepest.get(choice.graded, 0.0), choice.levels)
        seconds = prices.cycle(round(rows)) + prices.guesses(deepest)
        promised = objective.value(expected, seconds)
        if promised > most and promised > plain * ADVANTAGE:
            most, speed, taken = promised, expected.tokens / seconds, number
    return ranked[:taken], speed


def _ranked(choices: Sequence[Choice], objective: Objective, seconds: float) -> list[Choice]:
    """By falling gain a row, each as what it adds to those of its request that come before it."""
    expected = Expected(0)
    gains = []
    for choice in choices:
        before = expected.of(choice.request_id)
        gains.append(objective.gain(before, choice.tokens, seconds) / choice.rows)
        expected.add(choice.request_id, choice.tokens)
    order = sorted(range(len(choices)), key=lambda at: (-gains[at], choices[at].depth, choices[at].request_id))
    return [choices[at] for at in order]
