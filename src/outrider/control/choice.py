"""Which guesses of all requests to take together, so that the pass promises most tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def best(choices: Sequence[Choice], count: int, prices: Prices) -> tuple[list[Choice], float]:
    """Those that are taken, none where plain decoding promises as much, and the tokens a second that they promise.

    Best-first by tokens a row; every number of them is weighed, as costs rise in steps. count: of all that decode.
    """
    ranked = sorted(choices, key=lambda choice: (-choice.tokens / choice.rows, choice.depth, choice.request_id))
    tokens = rows = float(count)
    plain = speed = tokens / prices.cycle(count) if count else 0.0
    taken = 0
    deepest: dict[bool, float] = {}
    for number, choice in enumerate(ranked, start=1):
        tokens += choice.tokens
        rows += choice.rows
        deepest[choice.graded] = max(deepest.get(choice.graded, 0.0), choice.levels)
        promised = tokens / (prices.cycle(round(rows)) + prices.guesses(deepest))
        if promised > speed and promised > plain * ADVANTAGE:
            speed, taken = promised, number
    return ranked[:taken], speed
