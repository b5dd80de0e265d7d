"""How deep all requests of a cycle in flight guess: their trees have one shape, so that one's rows are everybody's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from outrider.control.choice import ADVANTAGE
from outrider.control.life import Life
from outrider.control.objective import Expected, Objective
from outrider.control.prices import Prices

PROBE_SHARE = 0.006
"""Share of the time that may go into finding out, while guessing does not pay, whether a text has changed: of guesses
with a grade, and of drafters that do not rank."""
PROBE_DEPTH = 3
RETURN = 4.0
"""Reading must promise to bring back so many times its price: how much a text's guesses gain is not known before."""
SLIGHTLY = 8
"""Rows beyond a power of two that are left out, as a part of it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the trees of a cycle: most children of a node, most nodes of a tree, most rows of a pass."""

    width: int
    nodes: int
    rows: int

    def nodes_of(self, depth: int, count: int) -> int:
        """Nodes of each of `count` trees of so many levels: fewer where the rows of the pass would only just exceed a
        power of two, up to which a pass has tiles of its own.
        """
        if self.width == 1:
            return depth
        nodes = min(self.nodes, depth * self.width, self.rows // count - 1)
        rows = count * (nodes + 1)
        power = 1 << (rows.bit_length() - 1)
        fewer = power // count - 1 if rows - power <= power // SLIGHTLY else nodes
        return max(depth, fewer)


@dataclass(frozen=True, slots=True)
class Company:
    """The requests of a cycle in flight.

    Attributes:
        rates: of each one that guesses, the chance that a level is right if the one above is, and its most levels.
        count: of all; who does not guess has the rows, too. bounds: of their trees.
    """

    rates: Mapping[int, tuple[float, int]]
    count: int
    bounds: Bounds

    @property
    def most(self) -> int:
        """Levels that one of them may guess."""
        deepest = max((cap for _, cap in self.rates.values()), default=0)
        return max(0, min(deepest, self.bounds.rows // self.count - 1))

    def seconds(self, depth: int, prices: Prices) -> float:
        """Of a cycle in which every tree has so many levels."""
        rows = self.count * (1 + self.bounds.nodes_of(depth, self.count))
        return prices.cycle(rows) + prices.guesses({False: depth})

    def best(self, prices: Prices, objective: Objective) -> tuple[int, float]:
        """Levels that promise most if everyone guesses them, as far as it may, 0 where plain decoding does; and the
        seconds that such a cycle saves.
        """
        expected, chances = Expected(self.count), dict.fromkeys(self.rates, 1.0)
        plain = most = objective.value(expected, prices.cycle(self.count))
        best, saved = 0, 0.0
        for depth in range(1, self.most + 1):
            for number, (rate, cap) in self.rates.items():
                if depth <= cap:
                    chances[number] *= rate
                    expected.add(number, chances[number])
            seconds = self.seconds(depth, prices)
            promised = objective.value(expected, seconds)
            if promised > most and promised > plain * ADVANTAGE:
                best, most, saved = depth, promised, (promised / plain - 1) * seconds
        return best, saved

    def probe(self, prices: Prices, cycles: int, reading: float) -> int:
        """Levels of a guess that is to find out whether a text has changed, as many as the share of the time allows
        that so many cycles without one took; 0: not yet. reading: seconds that drafters must first spend on it.
        """
        plain = prices.cycle(self.count)
        allowed = PROBE_SHARE * cycles * plain - reading
        tried = range(min(self.most, PROBE_DEPTH), 0, -1)
        return next((depth for depth in tried if self.seconds(depth, prices) - plain <= allowed), 0)


class Together:
    """Decides for all requests in flight at once, and keeps when they last guessed."""

    def __init__(self) -> None:
        self.asked = 0
        """The cycle in which a guess was asked for, or a try was given that is still in the air."""

    def depths(
        self,
        rates: Mapping[int, tuple[float, int]],
        lives: Mapping[int, Life],
        bounds: Bounds,
        prices: Prices,
        objective: Objective,
        cycle: int,
    ) -> tuple[dict[int, int], bool]:
        """Levels of each request, and whether they promise a gain.

        Args:
            rates: as of `Company`. lives: of all that decode. cycle: how many were before this one.
        """
        known, lags = prices.drafting[False], {number: lives[number].lag for number in rates}
        company = Company(rates, len(lives), bounds)
        if company.most and any(lags.values()) and not known.has_read:
            # Nobody knows what reading costs: one does it, as many at once might read all their prompts for nothing.
            first = min((number for number in rates if lags[number]), key=lambda number: lags[number])
            self.asked = cycle
            return {first: min(rates[first][1], company.most, PROBE_DEPTH)}, False
        depth, saved = company.best(prices, objective)
        reading = known.catch_up * sum(lags.values())
        promises = depth > 0 and saved * fmean(life.left for life in lives.values()) / (1 + depth) >= RETURN * reading
        if not promises:
            depth = company.probe(prices, cycle - self.asked, reading)
            self.asked = cycle if depth else self.asked
        return {number: min(cap, depth) for number, (_, cap) in rates.items() if depth}, promises
