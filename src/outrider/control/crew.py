"""How deep all requests of a cycle in flight guess: their trees have one shape, so that one's rows are everybody's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.control.choice import ADVANTAGE
from outrider.control.objective import Expected, Objective
from outrider.control.prices import Prices

PROBE_SHARE = 0.006
"""Share of the time that may go into finding out, while guessing does not pay, whether a text has changed: of guesses
with a grade, and of drafters that do not rank."""
PROBE_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Crew:
    """The requests of a cycle in flight.

    Attributes:
        rates: of each one that guesses, the chance that a level is right if the one above is, and its most levels.
        count: of all; who does not guess has the rows, too. width, nodes: of every tree, at most.
    """

    rates: Mapping[int, tuple[float, int]]
    count: int
    width: int
    nodes: int

    @property
    def most(self) -> int:
        """Levels that one of them may guess."""
        return max((cap for _, cap in self.rates.values()), default=0)

    def seconds(self, depth: int, prices: Prices) -> float:
        """Of a cycle in which every tree has so many levels."""
        nodes = depth if self.width == 1 else min(self.nodes, depth * self.width)
        return prices.cycle(self.count * (1 + nodes)) + prices.guesses({False: depth})

    def best(self, prices: Prices, objective: Objective) -> int:
        """Levels that promise most if everyone guesses them, as far as it may; 0 where plain decoding does."""
        expected, chances = Expected(self.count), dict.fromkeys(self.rates, 1.0)
        plain = most = objective.value(expected, prices.cycle(self.count))
        best = 0
        for depth in range(1, self.most + 1):
            for number, (rate, cap) in self.rates.items():
                if depth <= cap:
                    chances[number] *= rate
                    expected.add(number, chances[number])
            promised = objective.value(expected, self.seconds(depth, prices))
            if promised > most and promised > plain * ADVANTAGE:
                best, most = depth, promised
        return best

    def probe(self, prices: Prices, cycles: int, reading: float) -> int:
        """Levels of a guess that is to find out whether a text has changed, as many as the share of the time allows
        that so many cycles without one took; 0: not yet. reading: seconds that drafters must first spend on it.
        """
        plain = prices.cycle(self.count)
        allowed = PROBE_SHARE * cycles * plain - reading
        tried = range(min(self.most, PROBE_DEPTH), 0, -1)
        return next((depth for depth in tried if self.seconds(depth, prices) - plain <= allowed), 0)
