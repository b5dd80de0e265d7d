"""Measured seconds of a target pass by its rows."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
PATIENCE = 1.5
"""Seconds that measuring may take before it stops at the width it has reached."""
REFINE = 0.05
"""Weight of one new measurement: a busy machine must not swing the table."""
SHARED = 0.75
"""Share of a change that is taken for the machine's, or the context's, and so for that of every width."""
OUTLIER = 2.0
"""What took longer than so many times the expected counts as that."""


class PassCost:
    """A monotone table of seconds by rows; linear between its widths, proportional beyond the last."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._widths = sorted(seconds)
        self._seconds = [seconds[width] for width in self._widths]

    @classmethod
    def measure(
        cls,
        run: Callable[[int], float],
        widths: tuple[int, ...] = WIDTHS,
        repeats: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> PassCost:
        """`run(width)` makes one pass and returns its seconds; the least of `repeats` counts, after a warm-up.

        Where passes are slow, wide ones are left out (the table then grows in proportion), so that a start stays short.
        """
        table: dict[int, float] = {}
        started = clock()
        for width in widths:
            if table and clock() - started > PATIENCE:
                break
            run(width)
            table[width] = min(run(width) for _ in range(repeats))
        return cls(table)

    def seconds(self, rows: int) -> float:
        """Expected seconds of a pass; never falls as rows grow."""
        index = bisect_left(self._widths, rows)
        monotone = max(self._seconds[: index + 1])
        if index == len(self._widths):
            return monotone * rows / self._widths[-1]
        if self._widths[index] == rows or index == 0:
            return monotone
        low, high = self._widths[index - 1], self._widths[index]
        floor = max(self._seconds[:index])
        return floor + (monotone - floor) * (rows - low) / (high - low)

    def table(self) -> dict[int, float]:
        return {width: self.seconds(width) for width in self._widths}

    def learn_pass(self, rows: int, seconds: float) -> None:
        """Refine the entry of exactly this width, and with a part of the change the others, since what slows a machine
        slows every width; outliers are cut.
        """
        expected = self.seconds(rows)
        for index, width in enumerate(self._widths):
            old, weight = (self._seconds[index], REFINE) if width == rows else (expected, REFINE * SHARED)
            self._seconds[index] *= 1 + weight * (min(seconds / old, OUTLIER) - 1)
