"""Running estimates of how often a guess is right, for each request, shrunk to the pool of all requests."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 24.0
"""Trials after which old evidence has lost most of its weight: text changes its nature within a few sentences."""
SHRINK = 4.0
"""The pool counts as much as so many of a request's own trials."""
PRIOR_TRIALS = 4.0
PRIOR_RATE = 0.6


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
        self._pool = _Counts(PRIOR_RATE * PRIOR_TRIALS, PRIOR_TRIALS)
        self._requests: dict[int, _Counts] = {}

    def rate(self, request_id: int) -> float:
        """In (0, 1)."""
        pool = (self._pool.hits + 0.5) / (self._pool.trials + 1.0)
        own = self._requests.get(request_id)
        if own is None:
            return pool
        return (own.hits + SHRINK * pool) / (own.trials + SHRINK)

    def learn(self, request_id: int, depth: int, accepted: int) -> None:
        """A tree of `depth` levels had `accepted` levels accepted: so many hits, and one miss unless all were."""
        if depth == 0:
            return
        trials = min(depth, accepted + 1)
        self._pool.add(accepted, trials)
        self._requests.setdefault(request_id, _Counts()).add(accepted, trials)

    def forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
