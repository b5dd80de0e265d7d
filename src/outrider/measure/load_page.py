"""A report of `load` as sections of a page: what clients saw by level, way and task, beside plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.measure.page import Plot, Section, milliseconds, number, share, table
from outrider.measure.plots import MISSING, Curve, can_draw, curves

PERCENTILES = ("p50", "p95", "p99")


def sections(report: Mapping[str, Any]) -> list[Section]:
    """All of a report."""
    draw = can_draw()
    made = [
        Section(_head(report, draw)),
        Section(_failed(report)),
        Section(_levels(report), list(_by_clients(report)) if draw else ()),
        Section(_latency(report), list(_waits(report)) if draw else ()),
        Section(_tasks(report)),
        Section(_acceptance(report), list(_positions(report)) if draw else ()),
        Section(_server(report)),
    ]
    return [section for section in made if section.text]


def _lines(*parts: str | Iterator[str]) -> str:
    return "\n".join(line for part in parts for line in ([part] if isinstance(part, str) else part))


def _head(report: Mapping[str, Any], draw: bool) -> str:
    served = ", ".join(f"{name} {value}" for name, value in report["server"].items())
    counts = ", ".join(f"{task} {report['tasks'].count(task)}" for task in dict.fromkeys(report["tasks"]))
    goal = report["goal"]
    return _lines(
        f"# Load on {report['url']}",
        "",
        f"{served + '; ' if served else ''}asked from {report['machine']}; {report['date']}, commit "
        f"{report['commit']}.",
        "",
        f"`{report['command']}`",
        "",
        f"Prompts: {counts}, in turns; {report['repeats']} time(s) each level. A good request has its first token "
        f"within {goal['first_token']:g} s and a token in {goal['token']:g} s on average. A ratio is the median over "
        "prompts of an answer's tokens a second by those of the same level drawn plainly, with the bounds that hold it "
        "in 95 of 100 such runs (bootstrap over prompts; none for fewer than five).",
        *(["", MISSING] if not draw else []),
    )


def _failed(report: Mapping[str, Any]) -> str:
    rows = [(each["level"], error, count) for each in report["loads"] for error, count in each["errors"].items()]
    if not rows:
        return ""
    return _lines(
        "## Failed", "", "No figure counts these.", "", *table(("load", "why there is no answer", "requests"), rows)
    )


def _ratio(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    bounds = "" if found["low"] is None else f" ({found['low']:.2f} to {found['high']:.2f})"
    return f"{found['ratio']:.2f}{bounds}"


def _levels(report: Mapping[str, Any]) -> str:
    rows = [
        (
            each["level"],
            *(number(each[name]) for name in ("tokens_per_second", "requests_per_second", "goodput")),
            f"{each['failed']} of {each['requests']}",
            *(_ratio(each["ratio"]), number(each["estimated"]), number(each["tau"])),
        )
        for each in report["loads"]
    ]
    columns = ("load", "tokens/s", "requests/s", "good/s", "failed", "ratio to plain", "estimated live", "tau")
    return _lines("## Throughput", "", *table(columns, rows))


def _latency(report: Mapping[str, Any]) -> str:
    note = (
        "Milliseconds at P50 / P95 / P99. *between*: two pieces of text, a burst being one; *token*: a request's mean."
    )
    rows = [
        (each["level"], *(_spread(each[name]) for name in ("first_token", "between", "token", "whole")))
        for each in report["loads"]
    ]
    return _lines("## Latency", "", note, "", *table(("load", "first token", "between", "token", "whole answer"), rows))


def _spread(found: Mapping[str, float]) -> str:
    return " / ".join(milliseconds(found[name], 1) for name in PERCENTILES) if found else "failed"


def _tasks(report: Mapping[str, Any]) -> str:
    if len(set(report["tasks"])) < 2:
        return ""
    rows = []
    for each in report["loads"]:
        for task, found in each["by_task"].items():
            spreads = (_spread(found[name]) for name in ("first_token", "token"))
            failed = f"{found['failed']} of {found['requests']}"
            rows.append((each["level"], task, _ratio(found["ratio"]), number(found["tau"]), *spreads, failed))
    columns = ("load", "task", "ratio to plain", "tau", "first token, ms", "token, ms", "failed")
    return _lines("## By task", "", *table(columns, rows))


def rates(each: Mapping[str, Any]) -> list[float]:
    """The chance that a cycle keeps its i-th guess, given that it kept the one before."""
    before = [each["cycles"], *each["accepted_by_position"]]
    return [a / b for a, b in zip(each["accepted_by_position"], before, strict=False) if b]


def _acceptance(report: Mapping[str, Any]) -> str:
    rows = [
        (each["level"], number(each["tau"]), " ".join(f"{rate:.2f}" for rate in found))
        for each in report["loads"]
        if (found := rates(each))
    ]
    if not rows:
        return ""
    return _lines("## Acceptance by position", "", *table(("load", "tau", "accepted at 1, 2, ..."), rows))


def _server(report: Mapping[str, Any]) -> str:
    said: list[str] = []
    parts = list(dict.fromkeys(part for each in report["loads"] for part in each["parts"]))
    if parts:
        rows = []
        for each in report["loads"]:
            whole = sum(each["parts"].values())
            rows.append(
                (each["level"], *(share(each["parts"].get(part, 0.0) / whole if whole else None) for part in parts))
            )
        said += ["", "Where the seconds of its passes went:", "", *table(("load", *parts), rows)]
    if report["memory"]:
        held = ", ".join(f"{name.replace('_', ' ')} {size / 2**20:,.0f}" for name, size in report["memory"].items())
        said += ["", f"Memory as planned, MiB: {held}."]
    return _lines("## The server, as it tells of itself", *said) if said else ""


def _series(report: Mapping[str, Any]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Levels of clients by temperature and way, fewest first."""
    groups: dict[tuple[float, bool], list[Mapping[str, Any]]] = {}
    for each in report["loads"]:
        if each["clients"] is not None:
            groups.setdefault((each["temperature"], each["is_plain"]), []).append(each)
    several = len({temperature for temperature, _ in groups}) > 1
    for (temperature, is_plain), found in groups.items():
        name = ("plain" if is_plain else "speculative") + (f", T = {temperature:g}" if several else "")
        yield name, sorted(found, key=lambda each: each["clients"])


def _by_clients(report: Mapping[str, Any]) -> Iterator[Plot]:
    groups = list(_series(report))
    if not any(len(found) > 1 for _, found in groups):
        return
    speeds = [
        Curve(name, [e["clients"] for e in found], [e["tokens_per_second"] for e in found], series=i)
        for i, (name, found) in enumerate(groups)
    ]
    yield Plot(
        curves(speeds, "clients at once", "tokens a second", doubling=True), "Tokens a second, all clients together."
    )
    ratios = []
    for i, (name, found) in enumerate(groups):
        known = [each for each in found if each["ratio"] is not None]
        if known:
            bounds = [_bounds(each["ratio"]) for each in known]
            y = [each["ratio"]["ratio"] for each in known]
            ratios.append(Curve(name, [each["clients"] for each in known], y, bounds, series=i))
    if ratios:
        caption = (
            "Speed-up of an answer against clients at once: medians over prompts with 95 % bounds, 1 is plain decoding."
        )
        yield Plot(curves(ratios, "clients at once", "times plain decoding", 1.0, doubling=True), caption)


def _bounds(found: Mapping[str, Any]) -> tuple[float, float] | None:
    return None if found["low"] is None else (found["low"], found["high"])


def _waits(report: Mapping[str, Any]) -> Iterator[Plot]:
    groups = list(_series(report))
    for name, said in (("first_token", "Time to the first token"), ("token", "Time of a token, as an answer's mean")):
        found = [
            Curve(way, [e["clients"] for e in known], [1e3 * e[name]["p95"] for e in known], series=i)
            for i, (way, each) in enumerate(groups)
            if len(known := [e for e in each if e[name]]) > 1
        ]
        if found:
            yield Plot(curves(found, "clients at once", "milliseconds", doubling=True), f"{said}, P95 over requests.")


def _positions(report: Mapping[str, Any]) -> Iterator[Plot]:
    known = [(each["level"], kept) for each in report["loads"] if (kept := rates(each))]
    found = [Curve(name, range(1, 1 + len(kept)), kept, series=i) for i, (name, kept) in enumerate(known[:6])]
    if found:
        caption = "The chance that a cycle keeps its i-th guess, given that it kept the one before."
        yield Plot(curves(found, "position in the guess", "share kept"), caption)
