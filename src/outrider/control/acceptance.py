"""Running estimates of what guesses bring, by request and by the drafter's grade, shrunk to all requests'."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

MEMORY = 24.0
"""Trials after which old evidence has lost most of its weight: text changes its nature within a few sentences."""
SHRINK = 4.0
"""The pool counts as much as so many of a request's own trials."""
PRIOR_TRIALS = 4.0
PRIOR_RATE = 0.6
STEPS = (1, 2, 3, 4, 6, 9, 16)
"""Grades that are counted apart begin here, where the lengths of matches began to differ (docs/measurements.md)."""


@dataclass(slots=True)
class _Counts:
    hits: float = 0.0
    trials: float = 0.0

    def add(self, hits: int, trials: int) -> None:
        keep = 1.0 - min(1.0, trials / MEMORY)
        self.hits = self.hits * keep + hits
        self.trials = self.trials * keep + trials


class Acceptance:
    """The chance that a level of a tree holds the target's token, given that the level above did."""

    def __init__(self) -> None:
        self._pool: dict[int, _Counts] = {}
        self._requests: dict[int, dict[int, _Counts]] = {}

    def rate(self, request_id: int, grade: int | None = None) -> float:
        """In (0, 1)."""
        step = _step(grade)
        counts = self._pool.get(step) or _prior()
        pool = (counts.hits + 0.5) / (counts.trials + 1.0)
        own = self._requests.get(request_id, {}).get(step)
        if own is None:
            return pool
        return (own.hits + SHRINK * pool) / (own.trials + SHRINK)

    def learn(self, request_id: int, depth: int, accepted: int, grade: int | None = None) -> None:
        """A tree of `depth` levels had `accepted` levels accepted: so many hits, and one miss unless all were."""
        if depth == 0:
            return
        trials, step = min(depth, accepted + 1), _step(grade)
        self._pool.setdefault(step, _prior()).add(accepted, trials)
        self._requests.setdefault(request_id, {}).setdefault(step, _Counts()).add(accepted, trials)

    def forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)


def _prior() -> _Counts:
    return _Counts(PRIOR_RATE * PRIOR_TRIALS, PRIOR_TRIALS)


def _step(grade: int | None) -> int:
    """Grades between two steps share their counts; unknown ones have their own."""
    return 0 if grade is None else bisect_right(STEPS, grade)
