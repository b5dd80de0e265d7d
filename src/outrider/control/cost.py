"""Measured seconds of a target pass by its rows, and of a level of drafting, graded or not."""

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
CATCH_UP = 0.3
"""Weight of one new catch-up: they are rare, and as long as their prompts."""
COLD = 3
"""First measurements of a drafter, of which the least counts: code and caches are cold."""


class PassCost:
    """A monotone table of seconds by rows; linear between its widths, proportional beyond the last."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._widths = sorted(seconds)
        self._seconds = [seconds[width] for width in self._widths]
        self._draft_levels = [0.0, 0.0]
        self._num_drafts = [0, 0]
        self.catch_up = 0.0
        """Expected seconds beyond its levels of a guess whose drafter lags behind the text."""

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

    def draft_level(self, graded: bool) -> float:
        """Expected seconds of one level, 0 before any is known: a cascade's graded guesses come from its cheap drafter,
        the others from the dear one, so that each kind has its own price.
        """
        return self._draft_levels[graded]

    def learn_draft(self, levels: int, seconds: float, graded: bool, lagged: bool = False) -> None:
        """Refine the seconds of one level of drafting; outliers are cut.

        lagged: the drafter had text to catch up with, so that the seconds are no more than a bound from above.
        """
        old, new = self._draft_levels[graded], seconds / levels
        if lagged:
            self.catch_up += CATCH_UP * (max(0.0, seconds - levels * old) - self.catch_up)
            new = min(new, old)
        elif self._num_drafts[graded] < COLD:
            self._num_drafts[graded] += 1
            self._draft_levels[graded] = new if self._num_drafts[graded] == 1 else min(old, new)
            return
        self._draft_levels[graded] += REFINE * (min(new, OUTLIER * old) - old)
