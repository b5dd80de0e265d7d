"""The bars of a report: what a cycle may take and a card must reach, and what this run says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.measure.cycle import LOCKSTEP
from outrider.measure.report_rows import GREEDY, LAWS

PLAIN_SHARE = 0.85
"""Of the read limit, least, for plain decoding of one request."""
WIDE = {16: 1.06, 64: 1.20}
"""Most that a pass of so many rows takes of a plain one's time."""
REST = {"T=0": 0.3e-3, "T=1": 0.3e-3, "T=1, top-p, penalties": 0.6e-3}
"""Most seconds of a cycle in flight, or of one that must be in lockstep, that are neither target nor drafter."""
REST_IN_LOCKSTEP = 0.8e-3
"""Of the other cycles in lockstep."""
SPEED_UP, OF_BOUND, LEVEL = 2.7, 0.95, 0.7
"""Least ratio to plain decoding, share of tau x t_plain / (t_verify + t_draft + t_rest), share of a level's limit."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What was found, beside what is wanted, in words."""

    what: str
    found: str
    wanted: str
    kept: bool


def bars(report: Mapping[str, Any]) -> Iterator[Bar]:
    """Those that the report has figures for, of one request. Passes are read as they take when they wait for one
    another, where that was measured: as in flight, and without what the host does for each."""
    for row in (row for row in report["plain"] if row["together"] == 1):
        yield _least(f"plain, {row['law']}, {row['way']}: of the read limit", row["share_of_limit"], PLAIN_SHARE)
    passes = {p["rows"]: p["queued"] or p["seconds"] for p in report["passes"] if p["requests"] == 1}
    for rows, most in WIDE.items():
        if {1, rows} <= passes.keys():
            ratio = passes[rows] / passes[1]
            yield Bar(f"a pass of {rows} rows by a plain one", f"{ratio:.3f}", f"<= {most}", ratio <= most)
    for row in (row for row in report["shapes"] if "error" not in row):
        name = f"{row['drafter']}, {row['law']}, {row['nodes']} nodes, in flight"
        yield _rest(name, row["rest"], REST[row["law"]])
    for row in (r for r in report["speculative"] if "error" not in r and r["together"] == 1):
        yield from _of_row(row)


def _of_row(row: Mapping[str, Any]) -> Iterator[Bar]:
    synthetic = ", synthetic acceptance" if row["synthetic"] else ""
    name = f"{row['drafter']}, {row['law']}{synthetic}, {row['way']}"
    warps = len(LAWS[row["law"]]) > 1
    yield _rest(name, row["rest"], REST_IN_LOCKSTEP if row["way"] == LOCKSTEP and not warps else REST[row["law"]])
    if row["law"] == GREEDY and not row["synthetic"] and row["share_of_bound"] is not None:
        yield _least(f"{name}: of the bound", row["share_of_bound"], OF_BOUND)
        yield Bar(f"{name}: by plain", f"{row['ratio']:.2f}", f">= {SPEED_UP}", row["ratio"] >= SPEED_UP)
    if row["level_share_of_limit"]:
        yield _least(f"{name}: a level's read limit", row["level_share_of_limit"], LEVEL)


def _least(what: str, share: float, least: float) -> Bar:
    return Bar(what, f"{share:.1%}", f">= {least:.0%}", share >= least)


def _rest(name: str, seconds: float, most: float) -> Bar:
    return Bar(f"{name}: rest", f"{1e3 * seconds:.3f} ms", f"<= {1e3 * most:.1f} ms", seconds <= most)
