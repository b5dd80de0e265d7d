"""Measured seconds of a pass, and of all else of a cycle but drafting, by rows, requests and the keys they read."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 256
"""Keys that each row of a measured pass reads; more or fewer are priced apart."""
FAR, FAR_WIDTH = 2048, 8
"""Keys and rows of the passes that tell what a key costs, and what a request does."""
PATIENCE = 1.5
"""Seconds that measuring may take before it stops at the width it has reached."""
PACE = 0.04
"""Weight of one new measurement in the machine's pace, which is common to all widths: what slows one slows all."""
REFINE = 0.015
"""Its weight in the widths beside it: a busy machine must not swing the table."""
OUTLIER = 2.0
"""What took longer than so many times the expected counts as that."""
KNOWN = 0.25
"""A kept table serves again where its narrowest and a wide pass, in proportion, are what they were up to this share."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a pass is asked for: rows in all, of how many requests, and keys that all rows read together."""

    rows: int
    requests: int = 1
    keys: int | None = None
    """None: `CONTEXT` a row."""


class PassCost:
    """Knots of seconds by rows, monotone, linear between them and proportional beyond the last, at a common pace.

    Args:
        seconds: by rows, of one request with `CONTEXT` keys a row. key: seconds of one more key of one row.
        request: seconds of one more request among as many rows.
    """

    def __init__(self, seconds: Mapping[int, float], key: float = 0.0, request: float = 0.0) -> None:
        self._widths = sorted(seconds)
        self._seconds = isotonic([seconds[width] for width in self._widths])
        self._pace = 1.0
        self.key = key
        self.request = request

    @classmethod
    def measure(
        cls,
        run: Callable[[Load], float],
        widths: tuple[int, ...] = WIDTHS,
        far: int = FAR,
        kept: Mapping[str, Any] | None = None,
        repeats: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> PassCost:
        """`run(load)` makes one pass and returns its seconds; the least of `repeats` counts, after a warm-up.

        Where passes are slow, wide ones are left out (the table then grows in proportion), so that a start stays short.

        Args:
            far: keys of the passes that tell what a key costs; no more than `CONTEXT`: none is made. kept: what
                `to_json` gave at an earlier start. Two passes tell whether it still holds; then it is taken.
        """
        started = clock()

        def least(load: Load) -> float:
            run(load)
            return min(run(load) for _ in range(repeats))

        if kept is not None:
            known = cls.from_json(kept)
            now = {width: least(Load(width)) for width in (widths[0], min(FAR_WIDTH, widths[-1]))}
            if known._still_holds(now):
                return known
        table: dict[int, float] = {}
        key = request = 0.0
        for width in widths:
            if table and clock() - started > PATIENCE:
                break
            table[width] = least(Load(width))
            if width == FAR_WIDTH and far > CONTEXT:
                key = max(0.0, least(Load(width, 1, width * far)) - table[width]) / (width * (far - CONTEXT))
                request = max(0.0, least(Load(width, width)) - table[width]) / (width - 1)
        return cls(table, key, request)

    def seconds(self, rows: float, requests: int = 1, keys: float | None = None) -> float:
        """Expected of a cycle that drafts nothing, or whose drafting is priced apart; never falls as rows grow."""
        return self._pace * self._table(rows) + self._beside(rows, requests, keys)

    def many(self, rows: np.ndarray[Any, Any], requests: int = 1, keys: float | None = None) -> np.ndarray[Any, Any]:
        """As `seconds`, of many passes (N,) -> (N,); keys: of the first of them, whose rows read as many each."""
        found = self._pace * np.interp(rows, self._widths, self._seconds)
        found = np.where(rows > self._widths[-1], found * rows / self._widths[-1], found)
        each = CONTEXT if keys is None or not rows[0] else keys / rows[0]
        return found + self.request * (requests - 1) + np.maximum(self.key * (each - CONTEXT) * rows, -0.5 * found)

    def table(self) -> dict[int, float]:
        return {width: self.seconds(width) for width in self._widths}

    def learn(self, seconds: float, rows: int, requests: int = 1, keys: int | None = None) -> None:
        """Refine what is known: the pace of all, the knots beside `rows`, and the price of a key.

        Outliers are cut; nothing is run for it.
        """
        expected = self.seconds(rows, requests, keys)
        ratio = min(max(seconds / expected, 1 / OUTLIER), OUTLIER)
        self._pace *= 1 + PACE * (ratio - 1)
        for index, share in self._beside_knots(rows):
            self._seconds[index] *= 1 + REFINE * share * (ratio - 1)
        self._seconds = isotonic(self._seconds)
        more = 0.0 if keys is None else keys - CONTEXT * rows
        if self.key and more:  # normalised least mean squares: a step that is small where little is learned of it
            error = (ratio - 1) * expected
            self.key = max(0.0, self.key + REFINE * error * more / (more**2 + (8 * CONTEXT * rows) ** 2))

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        seconds = [self._pace * value for value in self._seconds]
        return {"rows": self._widths, "seconds": seconds, "key": self.key, "request": self.request}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> PassCost:
        return cls(dict(zip(told["rows"], told["seconds"], strict=True)), told["key"], told["request"])

    def _still_holds(self, now: Mapping[int, float]) -> bool:
        """Whether passes measured now fit up to one pace, which is taken over."""
        paces = [seconds / self.seconds(width) for width, seconds in now.items()]
        if max(paces) > (1 + KNOWN) * min(paces) or not 1 / OUTLIER < min(paces) <= max(paces) < OUTLIER:
            return False
        self._pace *= sum(paces) / len(paces)
        return True

    def _table(self, rows: float) -> float:
        index = bisect_left(self._widths, rows)
        if index == len(self._widths):
            return self._seconds[-1] * rows / self._widths[-1]
        if index == 0 or self._widths[index] == rows:
            return self._seconds[index]
        low, high = self._widths[index - 1], self._widths[index]
        return self._seconds[index - 1] + (self._seconds[index] - self._seconds[index - 1]) * (rows - low) / (
            high - low
        )

    def _beside(self, rows: float, requests: int, keys: float | None) -> float:
        """What more requests and keys than a measured pass had take, or fewer save."""
        more = 0.0 if keys is None else self.key * (keys - CONTEXT * rows)
        return self.request * (requests - 1) + max(more, -0.5 * self._pace * self._table(rows))

    def _beside_knots(self, rows: int) -> list[tuple[int, float]]:
        """The knots on both sides of `rows`, by their shares in what is known of it."""
        index = bisect_left(self._widths, rows)
        if index == len(self._widths):
            return [(index - 1, 1.0)]
        if index == 0 or self._widths[index] == rows:
            return [(index, 1.0)]
        low, high = self._widths[index - 1], self._widths[index]
        share = (rows - low) / (high - low)
        return [(index - 1, 1 - share), (index, share)]


def isotonic(values: Sequence[float] | Iterable[float]) -> list[float]:
    """The never falling sequence that is nearest by least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, a), (high, b) = pools.pop(), pools.pop()
            pools.append(((low * a + high * b) / (a + b), a + b))
    return [mean for mean, count in pools for _ in range(count)]
