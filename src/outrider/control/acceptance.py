"""Running estimates of what guesses bring, by request and by all that is known beforehand, shrunk to all requests'.

Evidence is what is settled before anything is drawn: who guesses, the grade that it gave (the length of a match), the
temperature, the position in the guess, and how the request's own guesses fared. So nothing here anticipates a draw, as
the rejection rule forbids; what a drafter's chances say of single tokens is its own business (`drafters/weights.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

OWN_MEMORY, POOL_MEMORY = 24.0, 300.0
"""Trials after which old evidence has lost most of its weight: text changes its nature within a few sentences."""
SHRINK = 5.0
"""The pool counts as much as so many of a request's own trials, and all temperatures as so many of the pool's."""
STEPS = (1, 2, 3, 4, 6, 9, 16)
"""Grades that are counted apart begin here, where the lengths of matches began to differ (docs/measurements.md)."""
PRIORS = (0.6, 0.4, 0.5, 0.6, 0.65, 0.75, 0.8, 0.9)
"""The chance of a first token before anything is known: without a grade, then by step."""
PRIOR_TRIALS = 4.0
HEATS = (1e-6, 0.5, 0.9)
"""Temperatures that are counted apart begin here."""
POSITIONS = (2, 3, 4, 6, 9)
"""Positions in a guess that are counted apart begin here; what came so far lends its rates to what comes later."""
MOST = 0.98
FADE = 0.98
"""What is left of evidence each time that another drafter was preferred."""
OWN_WEIGHT, POOL_WEIGHT = 0.04, 0.01
"""Weights of one new tree in its request's means and in all requests': trees bring 0 or 4 tokens by chance, and what is
to be told from it is often less than a fifth of one."""
HOPED = (3.0, 4.0, 4.0)
"""Tokens accepted, nodes and levels of a tree before any was seen: worth a try, and soon given up."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a guess before it is made: the drafter's number, its grade, the request's temperature."""

    request_id: int
    member: int = 0
    grade: int | None = None
    temperature: float = 0.0

    @property
    def cell(self) -> tuple[int, int]:
        """Member and step of the grade: grades between two steps share their counts; unknown ones have their own."""
        return self.member, 0 if self.grade is None else bisect_right(STEPS, self.grade)

    @property
    def heat(self) -> int:
        return bisect_right(HEATS, self.temperature)


@dataclass(slots=True)
class _Counts:
    hits: float = 0.0
    trials: float = 0.0

    def add(self, hits: float, trials: float, memory: float) -> None:
        keep = max(0.0, 1.0 - trials / memory)
        self.hits = self.hits * keep + hits
        self.trials = self.trials * keep + trials

    def shrunk(self, towards: float) -> float:
        return (self.hits + SHRINK * towards) / (self.trials + SHRINK)


class Acceptance:
    """The chance that a level of a guess holds the target's token, given that the level above did."""

    def __init__(self) -> None:
        self._all: dict[tuple[int, int, int], _Counts] = {}
        self._heated: dict[tuple[int, int, int, int], _Counts] = {}
        self._own: dict[int, dict[tuple[int, int], _Counts]] = {}
        """Hits of a request, and the hits that the pool expected of it (in `trials`)."""

    def rates(self, evidence: Evidence, depth: int) -> list[float]:
        """Of the levels 1 to `depth`, each in (0, 1)."""
        lift = self._lift(evidence)
        bands = [min(MOST, rate * lift) for rate in self._pooled(evidence, bisect_right(POSITIONS, depth))]
        return [bands[bisect_right(POSITIONS, level)] for level in range(1, depth + 1)]

    def reach(self, evidence: Evidence, depth: int) -> list[float]:
        """The chances that the levels 1 to `depth` are accepted."""
        return list(accumulate(self.rates(evidence, depth), mul))

    def learn(self, evidence: Evidence, depth: int, accepted: int) -> None:
        """A guess of `depth` levels had `accepted` levels accepted: so many hits, and one miss unless all were."""
        trials = min(depth, accepted + 1)
        if not trials:
            return
        pooled = list(self._pooled(evidence, bisect_right(POSITIONS, trials)))
        expected = 0.0
        bands: dict[int, list[int]] = {}
        for level in range(1, trials + 1):
            band = bisect_right(POSITIONS, level)
            expected += min(MOST, pooled[band])
            counts = bands.setdefault(band, [0, 0])
            counts[0] += level <= accepted
            counts[1] += 1
        for band, (hits, tried) in bands.items():
            place = (*evidence.cell, band)
            self._all.setdefault(place, _Counts()).add(hits, tried, POOL_MEMORY)
            self._heated.setdefault((*place, evidence.heat), _Counts()).add(hits, tried, POOL_MEMORY)
        own = self._own.setdefault(evidence.request_id, {})
        own.setdefault(evidence.cell, _Counts()).add(float(accepted), expected, OWN_MEMORY)

    def fade(self, evidence: Evidence) -> None:
        """Such a guess was passed over: what is known of it counts less, so that it is tried again now and then."""
        for band in range(len(POSITIONS) + 1):
            place = (*evidence.cell, band)
            for counts in (self._all.get(place), self._heated.get((*place, evidence.heat))):
                if counts is not None:
                    counts.hits, counts.trials = FADE * counts.hits, FADE * counts.trials
        own = self._own.get(evidence.request_id, {}).get(evidence.cell)
        if own is not None:
            own.hits, own.trials = FADE * own.hits, FADE * own.trials

    def forget(self, request_id: int) -> None:
        self._own.pop(request_id, None)

    def _pooled(self, evidence: Evidence, last: int) -> Iterator[float]:
        """Rates of the bands of positions up to `last`: this temperature's, shrunk to all temperatures', shrunk to
        the band's before.
        """
        rate = PRIORS[evidence.cell[1]]
        weight = PRIOR_TRIALS / SHRINK
        for band in range(last + 1):
            place = (*evidence.cell, band)
            every = self._all.get(place)
            if every is not None:
                rate = (every.hits + SHRINK * weight * rate) / (every.trials + SHRINK * weight)
            heated = self._heated.get((*place, evidence.heat))
            here = rate if heated is None else heated.shrunk(rate)
            yield here
            rate, weight = here, 1.0

    def _lift(self, evidence: Evidence) -> float:
        """How much better than the pool expects the request's own guesses fare."""
        own = self._own.get(evidence.request_id, {}).get(evidence.cell)
        return 1.0 if own is None else own.shrunk(1.0)


@dataclass(slots=True)
class Shape:
    """Means of the trees that a drafter which ranks its guesses makes by itself: tokens accepted, nodes, levels."""

    accepted: float
    nodes: float
    levels: float

    def learn(self, accepted: int, nodes: int, levels: int, weight: float) -> None:
        self.accepted += weight * (accepted - self.accepted)
        self.nodes += weight * (nodes - self.nodes)
        self.levels += weight * (levels - self.levels)


class Shapes:
    """A shape a request and member; a new one begins as the mean of all of about its temperature."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, int], tuple[Shape, int]] = {}
        self._own: dict[tuple[int, int], Shape] = {}

    def of(self, evidence: Evidence) -> Shape:
        own = self._own.get((evidence.request_id, evidence.member))
        return own or self._pools.get((evidence.member, evidence.heat), (Shape(*HOPED), 0))[0]

    def learn(self, evidence: Evidence, accepted: int, nodes: int, levels: int) -> None:
        place = evidence.member, evidence.heat
        pool, count = self._pools.get(place, (Shape(*HOPED), 1))
        own = self._own.setdefault((evidence.request_id, evidence.member), replace(pool))
        count += 1
        for shape, weight in ((own, OWN_WEIGHT), (pool, POOL_WEIGHT)):
            # The first ones count in full: what was hoped is no evidence.
            shape.learn(accepted, nodes, levels, max(weight, 1 / count))
        self._pools[place] = pool, count

    def forget(self, request_id: int) -> None:
        for member in (0, 1):
            self._own.pop((request_id, member), None)
