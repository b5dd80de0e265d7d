"""The plots of a report of `bench`: speed-up by task, temperature, load and depth, acceptance by position, time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.measure.page import Plot
from outrider.measure.plots import Curve, curves, dots, stacked

RATIO = "times plain decoding"
SPLIT = ("prompt", "draft", "verify", "sample", "other", "flying")
MOST = 6
"""Series of one plot, and bars of one: more are left to the tables."""


def _chosen(report: Mapping[str, Any], **wanted: Any) -> list[Mapping[str, Any]]:
    """Rows where control decides, of this temperature or load, that have a ratio."""
    return [
        row
        for row in report["speed"]
        if not row["error"]
        and row["shape"] is None
        and row["overall"]["ratio_to_plain"] is not None
        and all(row[name] == value for name, value in wanted.items())
    ]


def _first(report: Mapping[str, Any], name: str) -> Any:
    return next((row[name] for row in _chosen(report)), None)


def _drafters(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["drafter"] for row in rows))[:MOST]


def by_task(report: Mapping[str, Any]) -> Iterator[Plot]:
    """A row a task, at the first temperature, one prompt at once."""
    tasks = list(report["tasks"])
    rows = _chosen(report, temperature=_first(report, "temperature"), together=_first(report, "together"))
    if not rows:
        return
    tasks = tasks if len(tasks) > 1 else []  # one task is all there is
    groups = {
        row["drafter"]: [_dot(row["speed"].get(task)) for task in tasks] + [_dot(row["overall"])] for row in rows[:MOST]
    }
    where = f"T = {rows[0]['temperature']:g}, {rows[0]['together']} at once"
    caption = f"Speed-up by task, {where}: medians over prompts with 95 % bounds, 1 is plain decoding."
    yield Plot(dots([*tasks, "all prompts"], groups, RATIO, 1.0), caption)


def _dot(figures: Mapping[str, Any] | None) -> tuple[float, float | None, float | None] | None:
    if figures is None or figures["ratio_to_plain"] is None:
        return None
    return (figures["ratio_to_plain"], *figures["interval"])


def by_temperature(report: Mapping[str, Any]) -> Iterator[Plot]:
    """Where several were measured."""
    rows = _chosen(report, together=_first(report, "together"))
    yield from _along(rows, "temperature", "temperature", "Speed-up against temperature", False)


def by_concurrency(report: Mapping[str, Any]) -> Iterator[Plot]:
    """Where several were measured."""
    rows = _chosen(report, temperature=_first(report, "temperature"))
    yield from _along(rows, "together", "requests at once", "Speed-up against concurrency", True)


def _along(rows: Sequence[Mapping[str, Any]], name: str, label: str, said: str, doubling: bool) -> Iterator[Plot]:
    if len({row[name] for row in rows}) < 2:
        return
    found = []
    for series, drafter in enumerate(_drafters(rows)):
        mine = sorted((row for row in rows if row["drafter"] == drafter), key=lambda row: row[name])
        figures = [row["overall"] for row in mine]
        found.append(
            Curve(
                drafter,
                [row[name] for row in mine],
                [each["ratio_to_plain"] for each in figures],
                [_known(each["interval"]) for each in figures],
                series=series,
            )
        )
    yield Plot(curves(found, label, RATIO, 1.0, doubling), f"{said}: medians over prompts with 95 % bounds.")


def _known(interval: Sequence[float | None]) -> tuple[float, float] | None:
    low, high = interval
    return None if low is None or high is None else (low, high)


def by_depth(report: Mapping[str, Any]) -> Iterator[Plot]:
    """Measured chains beside both predicted curves, a plot a drafter and temperature."""
    for found in report["theory"]:
        drafter, temperature = found["drafter"], found["temperature"]
        rows = [row for row in chains(report, drafter, temperature) if row["overall"]["decode_ratio"]]
        decode = [row["overall"]["decode_ratio"] for row in rows]
        depths = [point["depth"] for point in found["points"]]
        drawn = [
            Curve(
                "measured",
                [row["shape"]["depth"] for row in rows],
                [each["ratio"] for each in decode],
                [_known((each["low"], each["high"])) for each in decode],
            ),
            Curve("theory, rows free", depths, [p["free"] for p in found["points"]], is_theory=True, series=2),
            Curve(
                "theory, rows priced",
                depths,
                [p["priced"] for p in found["points"]],
                is_theory=True,
                series=1,
                dash="-.",
            ),
        ]
        own = [
            row["overall"]["decode_ratio"]["ratio"]
            for row in _chosen(report, temperature=temperature, together=1, drafter=drafter)
            if row["overall"]["decode_ratio"]
        ]
        level = ("control decides", own[0]) if own else None
        caption = (
            f"{drafter}, T = {temperature:g}: speed-up of decoding against the depth of its chains. Theory with one "
            f"chance alpha = {found['alpha']:.2f} for every guess, at {found['draft']:.2f} plain cycles a guess."
        )
        yield Plot(curves(drawn, "guesses a cycle", RATIO, 1.0, level=level), caption)


def chains(report: Mapping[str, Any], drafter: str, temperature: float) -> list[Mapping[str, Any]]:
    """Rows of speed of one drafter at fixed depths, one prompt at once, shallow first."""
    found = [
        row
        for row in report["speed"]
        if not row["error"]
        and row["shape"] is not None
        and (row["drafter"], row["temperature"], row["together"]) == (drafter, temperature, 1)
    ]
    return sorted(found, key=lambda row: row["shape"]["depth"])


def by_position(report: Mapping[str, Any]) -> Iterator[Plot]:
    """Chances of the i-th guess given the one before, by drafter: of its last fixed shape, else as control decided."""
    rows = [row for row in report["acceptance"] if not row["error"]] or _deepest(report)
    rows = [row for row in rows if row["temperature"] == rows[0]["temperature"] and row["acceptance_by_position"]]
    chosen = {row["drafter"]: row for row in rows}
    found = [
        Curve(drafter, range(1, 1 + len(row["acceptance_by_position"])), row["acceptance_by_position"], series=series)
        for series, (drafter, row) in enumerate(list(chosen.items())[:MOST])
    ]
    if found:
        caption = (
            "Acceptance by position: the chance that a cycle keeps its i-th guess, given that it kept the one before."
        )
        yield Plot(curves(found, "position in the guess", "share kept"), caption)


def _deepest(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of the rows of speed, for every drafter those of its deepest fixed chain last; without one, control's."""
    rows = [row for row in report["speed"] if not row["error"] and row["cycles"] and row["together"] == 1]
    return sorted(rows, key=lambda row: -1 if row["shape"] is None else row["shape"]["depth"])


def split(report: Mapping[str, Any]) -> Iterator[Plot]:
    """Seconds a thousand tokens by part, plain decoding beside each drafter, where control decides."""
    names: list[str] = []
    parts: dict[str, list[float]] = {name: [] for name in SPLIT}
    for row in _chosen(report)[:MOST]:
        where = f"T = {row['temperature']:g}, {row['together']} at once"
        for who, figures in ((row["drafter"], row["overall"]), ("plain", row["plain"])):
            found, rate = figures["parts"], figures["tokens_per_second"]
            if found is None or not rate:
                continue
            names.append(f"{who}, {where}")
            seconds = sum(found[name] for name in (*SPLIT, "outside"))
            for name in SPLIT:
                parts[name].append(1000 / rate * found[name] / seconds)
    shown = {("in flight" if name == "flying" else name): v for name, v in parts.items() if any(v)}
    if names:
        caption = "Seconds for a thousand tokens, by what they went into."
        yield Plot(stacked(names, shown, "seconds a thousand tokens"), caption, is_wide=True)
