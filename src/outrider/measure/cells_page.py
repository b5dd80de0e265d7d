"""Two sections of a report of `bench`: whether control is ever slower, and how well its prices foretell a cycle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.measure.cells import BAR, summary, verdict
from outrider.measure.page import milliseconds, number, share, table

MEASURES = {
    "ratio": "tokens a second",
    "p99_ratio": "P99 between pieces",
    "token_p99_ratio": "P99 of an answer's mean time between tokens",
}


def never_slower(report: Mapping[str, Any]) -> str:
    """Empty where nothing ran beside control but plain decoding."""
    cells = report["cells"]
    if not cells:
        return ""
    rows = []
    for cell in cells:
        noise = cell["noise"] or {}
        p99 = [milliseconds(cell["p99"].get(name), 1) for name in ("control", cell.get("evenest"))]
        rows.append(
            (
                *(cell["task"], f"{cell['temperature']:g}", cell["together"], cell["runs"]),
                *(cell.get("best", "failed"), bounds(cell.get("ratio")), verdict(cell.get("ratio"))),
                *(bounds(cell["ratios"].get("plain")), number(cell["tau"]), bounds(noise.get("ratio"))),
                *(" / ".join(p99), bounds(cell.get("p99_ratio")), bounds(noise.get("p99"))),
                bounds(cell.get("token_p99_ratio")),
            )
        )
    columns = ("task", "T", "at once", "runs", "best of plain and fixed", "control by it", f">= {BAR}", "by plain")
    waits = (
        "tau",
        "plain by plain",
        "P99 between, ms, here / best",
        "by it",
        "plain by plain",
        "P99 an answer, by best",
    )
    said = (
        "Control beside the better of plain decoding and every fixed depth, all in turns; above 1 it is the faster. "
        "Medians over turns of tokens a second, prompt included, with bounds by resampling turns; the best is the best "
        "of noisy figures, which favours it. *Between* is what a reader waits for the next piece: a cycle that guesses "
        "is longer than one that does not, and brings more. *An answer*: its mean time a token behind its first. "
        "*Plain by plain*: a second plain engine by the first, which shows what noise alone does."
    )
    return "\n".join(
        ["## Never slower", "", said, "", *_worst(report), "", *table((*columns, *waits), rows)],
    )


def _worst(report: Mapping[str, Any]) -> Iterator[str]:
    for name, found in summary(report["cells"]).items():
        worst = found["worst"]
        where = f"{worst['task']}, T = {worst['temperature']:g}, {worst['together']} at once"
        yield (
            f"- {MEASURES[name]}: {found['reached']} of {found['cells']} cells reach {BAR}, {found['missed']} surely "
            f"do not; the worst is {bounds(worst)}, {where}."
        )


def bounds(found: Mapping[str, Any] | None) -> str:
    """As "1.02 (0.98 to 1.05)"."""
    if found is None:
        return "-"
    told = "" if found["low"] is None else f" ({found['low']:.2f} to {found['high']:.2f})"
    return f"{found['ratio']:.2f}{told}"


def foretold(report: Mapping[str, Any], name_of: Any) -> str:
    """Empty where no pass could be foretold."""
    rows = []
    for row in report["speed"]:
        found = {} if row["error"] else row["overall"]["price_misses"]
        if found:
            kinds = [found.get(kind) for kind in ("all", "plain", "guessing")]
            told = (cell for kind in kinds for cell in (kind and kind["cycles"], share(kind and kind["median"])))
            rows.append(
                (name_of(row), f"{row['temperature']:g}", row["together"], *("-" if c is None else c for c in told))
            )
    if not rows:
        return ""
    said = (
        "How far the time of a cycle was from what control's prices foretold for its rows, levels and keys, before it "
        "was made: medians of |foretold / taken - 1| over the cycles that only decode."
    )
    columns = ("drafter", "T", "at once", "cycles", "off by", "without guesses", "off by", "with guesses", "off by")
    return "\n".join(["## Prices foretold", "", said, "", *table(columns, rows)])
