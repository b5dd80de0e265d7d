"""Measured seconds of a target pass by its rows and the keys that they read."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
PATIENCE = 1.5
"""Seconds that measuring may take before it stops at the width it has reached."""
STEADY, MOST_REPEATS = 0.05, 16
"""Seconds, and passes at most, until passes of one kind behind those of another have found their pace: the first few of
a narrow one took up to twice as long as the tenth."""
REFINE = 0.05
"""Weight of one new measurement: a busy machine must not swing the table."""
SHARED = 0.75
"""Share of a plain pass's change that is taken for the machine's, or the context's, and so for that of every width."""
AGREE = 1.25
"""Widths that were measured before must have become dearer, or cheaper, by about the same."""
CONTEXT, LONG = 256, 1024
"""Keys that each row of a measured pass reads, and where it is measured what more keys take."""
FEW, SEVERAL = 1, 8
"""Rows of those."""
OUTLIER = 2.0
"""What took longer than so many times the expected counts as that."""


class PassCost:
    """A monotone table of seconds by rows that read `CONTEXT` keys each; linear between its widths, proportional beyond
    the last. What lies at more keys, or fewer, costs or saves a part a key.

    Args:
        key: seconds of a key more of each request. row_key: of a key more of each further row of one request: the
            first one has brought it into the caches.
    """

    def __init__(self, seconds: Mapping[int, float], key: float = 0.0, row_key: float = 0.0) -> None:
        self._widths = sorted(seconds)
        self._seconds = [seconds[width] for width in self._widths]
        self._monotone = list(accumulate(self._seconds, max))
        self.key, self.row_key = key, row_key

    @classmethod
    def measure(
        cls,
        run: Callable[[int, int], float],
        widths: tuple[int, ...] = WIDTHS,
        repeats: int = 3,
        longest: int = LONG,
        clock: Callable[[], float] = time.perf_counter,
    ) -> PassCost:
        """`run(width, context)` makes one pass of a request's rows and returns its seconds; the least of `repeats`
        counts, or of more where passes are short.

        Where passes are slow, wide ones are left out (the table then grows in proportion), so that a start stays short.
        longest: keys that a row may read.
        """

        def least(width: int, context: int) -> float:
            return _least(run, width, context, repeats)

        table: dict[int, float] = {}
        started = clock()
        for width in widths:
            if table and clock() - started > PATIENCE:
                break
            table[width] = least(width, CONTEXT)
        more = min(LONG, longest) - CONTEXT
        if more < CONTEXT or SEVERAL not in table or clock() - started > PATIENCE:
            return cls(table)
        few, several = (least(width, CONTEXT + more) - table[width] for width in (FEW, SEVERAL))
        key = max(0.0, few / more)
        return cls(table, key, max(0.0, (several / more - key) / (SEVERAL - FEW)))

    def confirmed(self, run: Callable[[int, int], float], repeats: int = 3) -> float | None:
        """How many times as long passes take now, by one row and by several; None where these do not agree, so that
        all must be measured anew. run: as of `measure`.
        """
        widths = [width for width in (FEW, SEVERAL) if width in self._widths]
        ratios = []
        for width in widths:
            ratios.append(_least(run, width, CONTEXT, repeats) / self._base(width))
        if not ratios or max(ratios) > AGREE * min(ratios):
            return None
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    def scaled(self, by: float) -> PassCost:
        """Of a machine that takes so many times as long."""
        table = zip(self._widths, self._seconds, strict=True)
        return PassCost({width: seconds * by for width, seconds in table}, self.key * by, self.row_key * by)

    def to_json(self) -> dict[str, Any]:
        table = zip(self._widths, self._seconds, strict=True)
        return {"rows": {str(width): seconds for width, seconds in table}, "key": self.key, "row_key": self.row_key}

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> PassCost:
        """What `to_json` told.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: for anything else.
        """
        table = {int(width): float(seconds) for width, seconds in kept["rows"].items()}
        if not table or min(table) < 1 or not all(0 < seconds < math.inf for seconds in table.values()):
            raise ValueError("no table of seconds by rows")
        return cls(table, float(kept["key"]), float(kept["row_key"]))

    def seconds(self, rows: int, requests: int = 1, context: float = CONTEXT) -> float:
        """Expected seconds of a pass; never falls as rows grow. context: keys that a row reads, in the mean."""
        base = self._base(rows)
        more = (context - CONTEXT) * (self.key * requests + self.row_key * max(0, rows - requests))
        return max(base + more, base / 2)

    def table(self) -> dict[int, float]:
        return {width: self._base(width) for width in self._widths}

    def learn_pass(self, rows: int, seconds: float, requests: int = 1, context: float = CONTEXT) -> None:
        """Refine the entry of exactly this width; by a plain pass with a part of the change the others too, since what
        slows a machine slows every width. Outliers are cut.

        A pass with guesses says nothing of plain ones: its rows may be dearer than they were when they were measured,
        behind a drafter that has been through the caches, and plain decoding is not.
        """
        expected = self.seconds(rows, requests, context)
        more = expected - self._base(rows)
        shared = _step(seconds / expected, SHARED) if rows <= requests else 1.0
        told = [entry * shared for entry in self._seconds]
        index = bisect_left(self._widths, rows)
        if index < len(self._widths) and self._widths[index] == rows:
            # A narrower pass may be known to be dearer than this one: an entry is held to itself.
            told[index] = self._seconds[index] * _step(seconds / (self._seconds[index] + more), 1.0)
        elif rows > requests and 0 < index < len(self._widths):
            for near in (index - 1, index):  # the entries that it lies between, but for that of plain decoding
                if self._widths[near] > requests:
                    told[near] = self._seconds[near] * _step(seconds / expected, SHARED)
        self._seconds, self._monotone = told, list(accumulate(told, max))
        self.key *= shared
        self.row_key *= shared

    def _base(self, rows: int) -> float:
        index = bisect_left(self._widths, rows)
        if index == len(self._widths):
            return self._monotone[-1] * rows / self._widths[-1]
        if self._widths[index] == rows or index == 0:
            return self._monotone[index]
        low, high = self._widths[index - 1], self._widths[index]
        floor = self._monotone[index - 1]
        return floor + (self._monotone[index] - floor) * (rows - low) / (high - low)


def _least(run: Callable[[int, int], float], width: int, context: int, repeats: int) -> float:
    run(width, context)
    seconds = [run(width, context) for _ in range(repeats)]
    while sum(seconds) < STEADY and len(seconds) < MOST_REPEATS:
        seconds.append(run(width, context))
    return min(seconds)


def _step(ratio: float, share: float) -> float:
    """What an entry is multiplied by where its pass took `ratio` times as long as expected."""
    return 1 + REFINE * share * (min(ratio, OUTLIER) - 1)
