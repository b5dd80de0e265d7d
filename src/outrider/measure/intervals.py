"""Percentiles, and ratios with their bounds by resampling: what reports of speed have in common."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PERCENTILES = (50, 95, 99)
LEAST = 5
"""Values under which no bounds are told: of fewer, resampling says more than it knows."""
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A median over prompts, or turns, and bounds that hold it in 95 of 100 such runs; None of fewer than `LEAST`."""

    ratio: float
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """P50, P95 and P99; empty where there are no values."""
    if not values:
        return {}
    import numpy as np

    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


def quotient_of(percent: float, above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Interval | None:
    """One percentile of all values by another one's, with bootstrap bounds: pairs of runs are drawn anew, the same at
    every call; None where a side has no values.

    above, below: values by run, those of one turn at the same place.
    """
    import numpy as np

    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(above, below, strict=True) if len(a) and len(b)]
    if not pairs:
        return None

    def quotient(chosen: Sequence[int]) -> float:
        sides = (np.concatenate([pairs[number][side] for number in chosen]) for side in (0, 1))
        first, second = (float(np.percentile(values, percent)) for values in sides)
        return first / second

    found = quotient(range(len(pairs)))
    if len(pairs) < LEAST:
        return Interval(found, None, None)
    rng = np.random.default_rng(0)
    drawn = [quotient(rng.integers(len(pairs), size=len(pairs)).tolist()) for _ in range(RESAMPLES // 4)]
    low, high = np.percentile(drawn, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Interval(found, float(low), float(high))


def median(values: Sequence[float]) -> Interval | None:
    """The median with its bootstrap bounds (percentiles of resampled medians, the same at every call); None of nothing.

    Each value should be of a prompt, or a turn, of its own: what is drawn anew is these.
    """
    if not values:
        return None
    found = float(statistics.median(values))
    if len(values) < LEAST:
        return Interval(found, None, None)
    import numpy as np
    from scipy.stats import bootstrap

    drawn = bootstrap(
        (np.asarray(values, dtype=float),),
        np.median,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(found, float(drawn.low), float(drawn.high))
