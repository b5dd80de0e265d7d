"""Best-first over all running requests: how many of the offers, by falling worth of a row, promise the most.

Expected tokens of a pass with N guessed rows are R plus the sum of their path weights (Leviathan et al., 2211.17192;
best-first over all requests as in DSpark, 2607.05147). Where costs rise in steps the gain may come late, so every
number of offers is weighed, the empty one included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.control.cost import PassCost
from outrider.control.prices import Prices

DEADLINE = 0.05
"""Seconds between two tokens that are well spent, where the user named none: 20 tokens a second."""
PARTS = 24
"""Numbers of offers that are weighed where every request has to be looked at for each of them."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Something that may be added to a pass: `tokens` more are expected of `rows` more rows, `levels` of drafting deep.

    Attributes:
        depth: of the budget, where this is taken. member: who guesses. reading: seconds that its drafter must first
            spend on reading, spread over what that will serve.
    """

    request_id: int
    tokens: float
    rows: float
    levels: float
    depth: int
    member: int
    reading: float = 0.0


@dataclass(frozen=True, slots=True)
class Aim:
    """What is maximised over a cycle (`config.OBJECTIVES`).

    Attributes:
        objective: "throughput", tokens a second of all requests; "latency", the mean time that a request waits for a
            token, at its least; "goodput", tokens a second of the requests that keep the deadline.
        deadline: seconds between two tokens of a request that are well spent ("goodput").
    """

    objective: str = "throughput"
    deadline: float = DEADLINE


@dataclass(frozen=True, slots=True)
class Chosen:
    """The offers that are taken, of each request the last; tokens a second, and those of plain decoding; what the aim
    thinks of it in proportion to plain decoding.
    """

    offers: dict[int, Offer]
    speed: float
    plain: float
    worth: float


def choose(
    offers: Sequence[Offer],
    requests: Sequence[int],
    keys: float | None,
    prices: Prices,
    aim: Aim,
    advantage: float,
) -> Chosen:
    """The first so many offers, by falling tokens a row, that serve the aim best; none unless they are worth more than
    `advantage` times plain decoding. Offers of one request build on one another, in their order.

    Args:
        requests: ids of all that decode. keys: that their known tokens' rows read together.
    """
    count = len(requests)
    ranked = sorted(offers, key=lambda offer: -offer.tokens / offer.rows)
    tokens, rows, levels, reading = (
        np.array([0.0, *(getattr(offer, name) for offer in ranked)]) for name in ("tokens", "rows", "levels", "reading")
    )
    members = np.array([-1, *(offer.member for offer in ranked)])
    seen: set[int] = set()
    first = np.array([False, *(not (offer.request_id in seen or seen.add(offer.request_id)) for offer in ranked)])  # type: ignore[func-returns-value]
    seconds = prices.cost.many(count + np.cumsum(rows), count, keys) + np.cumsum(reading * first)
    for member, price in enumerate(prices.drafting):
        here = members == member
        if here.any():
            seconds += price.many(np.maximum.accumulate(levels * here), np.cumsum(here & first))
    total = count + np.cumsum(tokens)
    speeds = total / seconds
    values = _values(ranked, requests, total, seconds, aim)
    best = int(np.argmax(values))
    if values[best] <= advantage * values[0]:
        best = 0
    taken = {offer.request_id: offer for offer in ranked[:best]}
    worth = float(values[best] / values[0]) if values[0] else 1.0
    return Chosen(taken, float(speeds[best]), float(speeds[0]), worth)


def hopeless(count: int, most: int, keys: float | None, cost: PassCost, advantage: float) -> bool:
    """Whether not even guesses that are always right, for nothing, would pay beside `count` requests: what a row more
    takes is worth more than a token. Then nobody need be asked how sure he is.
    """
    more = np.unique(np.geomspace(1, max(1, count * most), 12).astype(np.int64))
    rows = np.concatenate(([count], count + more)).astype(np.float64)
    speeds = rows / cost.many(rows, count, keys)
    return bool(speeds[1:].max() <= advantage * speeds[0])


def _values(
    ranked: Sequence[Offer],
    requests: Sequence[int],
    total: np.ndarray[Any, Any],
    seconds: np.ndarray[Any, Any],
    aim: Aim,
) -> np.ndarray[Any, Any]:
    """What the aim thinks of taking the first 0, 1, 2, ... offers."""
    speeds: np.ndarray[Any, Any] = total / seconds
    if aim.objective == "throughput" or (len(requests) == 1 and aim.objective == "latency"):
        return speeds
    each = dict.fromkeys(requests, 1.0)
    if aim.objective == "latency":
        waits = [float(len(requests))]
        for offer in ranked:
            had = each[offer.request_id]
            each[offer.request_id] = had + offer.tokens
            waits.append(waits[-1] - 1 / had + 1 / (had + offer.tokens))
        return len(requests) / (np.array(waits) * seconds)
    # Those that keep the deadline come first, and among as many all tokens count: a hundredth part of what is in time.
    good = np.full(len(ranked) + 1, -np.inf)
    looked = {int(n) for n in np.linspace(0, len(ranked), min(len(ranked) + 1, PARTS))}
    for number in range(len(ranked) + 1):
        if number:
            each[ranked[number - 1].request_id] += ranked[number - 1].tokens
        if number in looked:
            spent = seconds[number]
            good[number] = sum(had for had in each.values() if spent <= aim.deadline * had) / spent
    return good + speeds / 100
