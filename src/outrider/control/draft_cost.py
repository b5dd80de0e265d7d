"""Seconds of a guess: a fixed part, a part a level, and one a token that its drafter has yet to read; all learnt."""

from __future__ import annotations

import math
from collections.abc import Mapping

REFINE = 0.05
"""Weight of one new measurement: a busy machine must not swing the prices."""
OUTLIER = 2.0
"""What took longer than so many times the expected counts as that."""
COLD = 3
"""First measurements, of which the least counts: code and caches are cold."""
READING = 32
"""Tokens that must have been read at once to tell the price of one."""
DEARER = 1.2
"""The price of reading rises no faster than this at a time: it is seldom seen, and where it is too high never again."""
FADING = 0.9995
"""What is left of it with every pass that it was not seen in, for the same reason."""
PROPORTIONAL = 1.0
"""Weight, in guesses, of the belief that one of twice the levels takes twice as long: a fixed part shows only where
levels vary."""


class DraftCost:
    """A line through (levels, seconds), by exponentially weighted moments.

    Drafters that run a pass a level have next to no fixed part; for those that say all positions in one pass, as
    Medusa's heads do, it is nearly all, and a level more is next to free.
    """

    def __init__(self) -> None:
        self._num_seen = self._num_read = 0
        self._levels = 0.0
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self.catch_up = 0.0
        """Expected seconds of a token that a lagging drafter must read first."""

    def to_json(self) -> dict[str, float]:
        """All that was learnt."""
        return {name.lstrip("_"): value for name, value in vars(self).items()}

    @classmethod
    def of_json(cls, kept: Mapping[str, float]) -> DraftCost:
        """What `to_json` told.

        Raises:
            KeyError, TypeError, ValueError: for anything else.
        """
        cost = cls()
        for name in vars(cost):
            value = kept[name.lstrip("_")]
            if not math.isfinite(value):
                raise ValueError(f"{name}={value} is no measurement")
            setattr(cost, name, value)
        return cost

    def scale(self, by: float) -> None:
        """The machine takes so many times as long now."""
        self._seconds *= by
        self._covariance *= by
        self.catch_up *= by

    def knows(self, reads: bool) -> bool:
        """Whether a guess was ever seen, and reading, where it `reads` a text first."""
        return self._num_seen > 0 and (self._num_read > 0 or not reads)

    @property
    def has_read(self) -> bool:
        """Whether reading was ever seen."""
        return self._num_read > 0

    @property
    def level(self) -> float:
        """Expected seconds of one more level; 0 before any is known."""
        if not self._num_seen:
            return 0.0
        mean, prior = self._seconds / self._levels, PROPORTIONAL * self._levels**2 / self._num_seen
        return min(mean, max(0.0, (self._covariance + prior * mean) / (self._variance + prior)))

    def seconds(self, levels: float) -> float:
        """Expected, of a guess of so many levels by a drafter that has read everything."""
        return self._seconds + (levels - self._levels) * self.level

    def learn(self, levels: int, seconds: float) -> None:
        """A guess of so many levels took so long; outliers are cut."""
        if self._num_seen < COLD:
            if not self._num_seen or seconds / levels < self._seconds / self._levels:
                self._levels, self._seconds = float(levels), seconds
            self._num_seen += 1
            return
        self._num_seen += 1
        across = levels - self._levels
        along = min(seconds, OUTLIER * self.seconds(levels)) - self._seconds
        self._levels += REFINE * across
        self._seconds += REFINE * along
        self._variance += REFINE * ((1 - REFINE) * across**2 - self._variance)
        self._covariance += REFINE * ((1 - REFINE) * across * along - self._covariance)

    def learn_catch_up(self, levels: int, seconds: float, lag: int) -> None:
        """A guess whose drafter had to read `lag` tokens first: no measure of the levels, only of the reading."""
        self._num_read += 1
        if lag >= READING:
            rest = max(0.0, seconds - self.seconds(levels)) / lag
            self.catch_up = min(rest, DEARER * self.catch_up) if self.catch_up else rest

    def fade(self) -> None:
        """Nobody read in this pass."""
        self.catch_up *= FADING
