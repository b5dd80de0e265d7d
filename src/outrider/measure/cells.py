"""Is control ever slower? Beside the better of plain decoding and every fixed depth, cell by cell of task and load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from outrider.measure.bench import PLAIN, Figures
from outrider.measure.contenders import Run
from outrider.measure.intervals import Interval, median, quotient_of
from outrider.measure.survey import Row

BAR = 0.98
"""Never slower: so much of the better one's speed, since no clock tells less apart."""
NOISE = "none"
"""The drafter of a second plain engine."""


def cells(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every task, temperature and load where control ran in turns with chains or with a second plain engine."""
    found = []
    for row in rows:
        if row.variant.shape is None and row.variant.drafter != NOISE and row.tallies:  # peers have none
            for task, (mine, plain) in row.speeds.items():
                # Who took the same turns was timed beside the very same runs of plain decoding.
                fellows = [r for r in rows if r is not row and task in r.speeds and r.speeds[task][1] is plain]
                fixed = {_name(r): r.speeds[task][0] for r in fellows if r.variant.shape is not None}
                twins = [r.speeds[task][0] for r in fellows if r.variant.drafter == NOISE]
                if fixed or twins:
                    where = {"task": task, "temperature": row.variant.temperature, "together": row.variant.together}
                    drafter = {"drafter": row.variant.drafter}
                    found.append({**where, **drafter, **_cell(mine, plain, fixed, twins[0] if twins else None)})
    return found


def _name(row: Row) -> str:
    shape = row.variant.shape
    return row.variant.drafter if shape is None else f"{row.variant.drafter}, {shape.name}"


def _cell(mine: Figures, plain: Figures, fixed: Mapping[str, Figures], twin: Figures | None) -> dict[str, Any]:
    """Ratios are above 1 where control is the faster. seconds: of every run, in turns, for who wants to add them up."""
    rivals = {name: each for name, each in {PLAIN: plain, **fixed}.items() if each.rate}
    sides = {"control": mine, **rivals, **({"plain again": twin} if twin else {})}
    told: dict[str, Any] = {
        "runs": len(mine.answered),
        "tokens_per_second": {name: each.rate for name, each in sides.items()},
        "p99": {name: _p99(each.answered) for name, each in sides.items()},
        "tau": mine.pooled().tau,
        "seconds": {name: [run.seconds for run in each.answered] for name, each in sides.items()},
        "ratios": {name: _told(goodput(mine, each)) for name, each in rivals.items()},
        "noise": None if twin is None else {"ratio": _told(goodput(twin, plain)), "p99": _told(waits(twin, plain))},
    }
    if rivals and mine.answered:
        best = max(rivals, key=lambda name: rivals[name].rate or 0.0)
        evenest = min(rivals, key=lambda name: told["p99"][name] or float("inf"))
        told |= {
            "best": best,
            "ratio": told["ratios"][best],
            "evenest": evenest,
            "p99_ratio": _told(waits(mine, rivals[evenest])),
            "token_p99_ratio": _told(min((answers(mine, each) for each in rivals.values()), key=_least)),
        }
    return told


def _least(found: Interval | None) -> float:
    return float("inf") if found is None else found.ratio


def _told(found: Interval | None) -> dict[str, Any] | None:
    return None if found is None else found.to_json()


def _pairs(mine: Figures, other: Figures) -> Iterator[tuple[Run, Run]]:
    """Runs of the same turn, where both answered."""
    return ((a, b) for a, b in zip(mine.runs, other.runs, strict=True) if a.error is None and b.error is None)


def goodput(mine: Figures, other: Figures) -> Interval | None:
    """Median over turns of tokens a second by the other's; bounds by resampling turns, not prompts alone: where all
    prompts are asked at once there is one block of them, run again and again.
    """
    return median([a.rate / b.rate for a, b in _pairs(mine, other)])


def waits(mine: Figures, other: Figures) -> Interval | None:
    """P99 of the time between what one cycle and the next brought to an answer: the other's by this one's."""
    return _quotient(mine, other, lambda run: run.gaps)


def answers(mine: Figures, other: Figures) -> Interval | None:
    """P99 over answers of the mean time between tokens: the other's by this one's."""
    return _quotient(mine, other, lambda run: run.between)


def _quotient(mine: Figures, other: Figures, of: Callable[[Run], Sequence[float]]) -> Interval | None:
    pairs = [(of(a), of(b)) for a, b in _pairs(mine, other)]
    return quotient_of(99, [b for _, b in pairs], [a for a, _ in pairs])


def _p99(runs: Sequence[Run]) -> float | None:
    import numpy as np

    gaps = [gap for run in runs for gap in run.gaps]
    return float(np.percentile(gaps, 99)) if gaps else None


def verdict(found: Mapping[str, Any] | None) -> str:
    """What a ratio with its bounds says of `BAR`."""
    if found is None:
        return "-"
    if found["ratio"] >= BAR:
        return "yes"
    return "no" if found["high"] is not None and found["high"] < BAR else "not surely"


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The worst cell of each measure, and how many reach `BAR`."""
    told = {}
    for name in ("ratio", "p99_ratio", "token_p99_ratio"):
        known = [cell for cell in found if cell.get(name)]
        if known:
            worst = min(known, key=lambda cell: cell[name]["ratio"])
            reached = sum(cell[name]["ratio"] >= BAR for cell in known)
            missed = sum(verdict(cell[name]) == "no" for cell in known)
            where = {key: worst[key] for key in ("task", "temperature", "together")}
            told[name] = {"cells": len(known), "reached": reached, "missed": missed, "worst": {**where, **worst[name]}}
    return told
