"""Seconds of a guess: a fixed part, one a level, one a level and further ask, one a token yet to be read."""

from __future__ import annotations

from typing import Any

import numpy as np

FORGET = 0.03
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
BELIEF = 1.0
"""Weight, in guesses, of the belief that one of twice the levels takes twice as long, whoever asks beside it: a fixed
part, and one an ask, show only where levels and asks vary."""
SWEEPS = 4


class DraftCost:
    """Least squares with forgetting over (1, levels, levels x further asks), none of them below 0.

    Drafters that run a pass a level have next to no fixed part; for those that say all positions in one pass, as
    Medusa's heads do, it is nearly all, and a level more is next to free.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._prices = [0.0, 0.0, 0.0]
        self._products = [[0.0] * 3 for _ in range(3)]
        self._along = [0.0] * 3
        self._believed = 0.0
        self.catch_up = 0.0
        """Expected seconds of a token that a lagging drafter must read first."""

    @property
    def level(self) -> float:
        """Expected seconds of one more level; 0 before any is known."""
        return self._prices[1]

    def seconds(self, levels: float, asks: int = 1) -> float:
        """Expected, of guesses of so many levels by a drafter that has read everything; nothing of none."""
        fixed, level, ask = self._prices
        return min(levels, 1.0) * fixed + levels * (level + ask * (asks - 1))

    def many(self, levels: np.ndarray[Any, Any], asks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """As `seconds`, of many cycles: (N,), (N,) -> (N,)."""
        fixed, level, ask = self._prices
        return np.minimum(levels, 1.0) * fixed + levels * (level + ask * np.maximum(asks - 1, 0))

    def learn(self, levels: int, seconds: float, asks: int = 1) -> None:
        """Guesses of so many levels, for so many asks at once, took so long; outliers are cut."""
        self._num_seen += 1
        if self._num_seen <= COLD:
            if self._num_seen == 1 or seconds / levels < self._believed:
                self._believed = seconds / levels
                self._prices = [0.0, self._believed, 0.0]
                self._products = [[0.0] * 3 for _ in range(3)]
                self._along = [0.0] * 3
                self._add(levels, seconds, asks, 1.0)
            return
        seconds = min(seconds, OUTLIER * self.seconds(levels, asks))
        self._believed += FORGET * (seconds / levels - self._believed)
        for row in self._products:
            row[:] = [(1 - FORGET) * value for value in row]
        self._along = [(1 - FORGET) * value for value in self._along]
        self._add(levels, seconds, asks, FORGET)
        self._fit()

    def learn_catch_up(self, levels: int, seconds: float, lag: int) -> None:
        """A guess whose drafter had to read `lag` tokens first: no measure of the levels, only of the reading."""
        if lag >= READING:
            rest = max(0.0, seconds - self.seconds(levels)) / lag
            self.catch_up = min(rest, DEARER * self.catch_up) if self.catch_up else rest

    def fade(self) -> None:
        """Nobody read in this pass."""
        self.catch_up *= FADING

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return {"prices": self._prices, "catch_up": self.catch_up}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> DraftCost:
        """As known from an earlier start: its prices are believed as the first measurements are."""
        cost = cls()
        cost._prices, cost.catch_up = [float(price) for price in told["prices"]], float(told["catch_up"])
        for levels in (1, 2, 4):
            cost._add(levels, cost.seconds(levels), 1, 1 / 3)
            cost._believed += cost.seconds(levels) / levels / 3
        cost._num_seen = COLD
        return cost

    def _add(self, levels: int, seconds: float, asks: int, weight: float) -> None:
        features = (1.0, float(levels), float(levels * (asks - 1)))
        for i, a in enumerate(features):
            self._along[i] += weight * a * seconds
            for j, b in enumerate(features):
                self._products[i][j] += weight * a * b

    def _fit(self) -> None:
        """Coordinate descent; the belief counts as a few measurements of proportional guesses, alone."""
        products, along, prices = self._products, self._along, self._prices
        share, least = BELIEF / self._num_seen, 1e-3 * products[1][1]
        ridge = [share * max(products[i][i], least) for i in range(3)]
        centre = (0.0, self._believed, 0.0)
        for _ in range(SWEEPS):
            for i in range(3):
                rest = along[i] - sum(products[i][j] * prices[j] for j in range(3) if j != i)
                prices[i] = max(0.0, (rest + ridge[i] * centre[i]) / (products[i][i] + ridge[i]))
