"""A report of `bench` as sections of a page: tables for readers, and plots where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.measure.bench_plots import (
    by_concurrency,
    by_depth,
    by_position,
    by_task,
    by_temperature,
    chains,
    split,
)
from outrider.measure.ceiling import GUESSES
from outrider.measure.cells_page import bounds, foretold, never_slower
from outrider.measure.page import Section, milliseconds, number, share, table
from outrider.measure.plots import MISSING, can_draw

PARTS = ("prompt", "draft", "verify", "sample", "other", "flying", "outside")
PERCENTILES = ("p50", "p95", "p99")


def sections(report: Mapping[str, Any]) -> list[Section]:
    """All of a report."""
    draw = can_draw()
    made = [
        Section(_head(report)),
        Section(_failures(report)),
        Section(_speed(report), [*by_task(report), *by_temperature(report), *by_concurrency(report)] if draw else ()),
        Section(never_slower(report)),
        Section(_depths(report), list(by_depth(report)) if draw else ()),
        Section(_acceptance(report), list(by_position(report)) if draw else ()),
        Section(_ceiling(report)),
        Section(_latency(report)),
        Section(_time(report), list(split(report)) if draw else ()),
        Section(foretold(report, name_of)),
        Section(_memory(report)),
    ]
    return [section for section in made if section.text]


def name_of(row: Mapping[str, Any]) -> str:
    """A row of speed by its drafter, and its depth where that was fixed."""
    shape = row["shape"]
    return row["drafter"] if shape is None else f"{row['drafter']}, {_shape(shape)}"


def _shape(shape: Mapping[str, Any]) -> str:
    if shape["width"] == 1:
        return f"chain {shape['depth']}"
    return f"tree {shape['depth']}x{shape['width']}, {shape['nodes']} nodes"


def ratio_of(figures: Mapping[str, Any]) -> str:
    """As "1.31 (1.25 to 1.38)"; "failed" where nothing was answered by both."""
    if figures["ratio_to_plain"] is None:
        return "failed"
    low, high = figures["interval"]
    bounds = "" if low is None else f" ({low:.2f} to {high:.2f})"
    return f"{figures['ratio_to_plain']:.2f}{bounds}"


def _measured(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in report["speed"] if not row["error"]]


def _lines(*parts: str | Iterator[str]) -> str:
    return "\n".join(line for part in parts for line in ([part] if isinstance(part, str) else part))


def _head(report: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{task} {count}" for task, count in report["tasks"].items())
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    plain = report["engines"].get("plain")
    decided = "" if plain is None else f" {plain['dtype']} on {plain['device']}, {plain['kernels']} kernels."
    limit = report["limit"]
    reads = "" if limit is None else f" It reads {limit['bytes_per_second'] / 1e9:,.1f} GB/s ({limit['way']})."
    return _lines(
        f"# {report['model']}: speculation against plain decoding",
        "",
        f"{report['machine']}; {report['date']}, commit {report['commit']}; {versions}.{decided}{reads}",
        "",
        f"`{report['command']}`",
        "",
        f"Prompts: {counts}; at most {report['max_tokens']} tokens each, each run {report['repeats']} time(s). Runs "
        "take turns with plain decoding in one process. A ratio is the median over prompts of tokens a second by "
        "plain decoding's, prompt included, with the bounds that hold it in 95 of 100 such runs (bootstrap over "
        "prompts; none for fewer than five). tau counts the target's own token.",
        *(["", MISSING] if not can_draw() else []),
    )


def _failures(report: Mapping[str, Any]) -> str:
    found = report["failures"]
    errors = [row for row in (*report["acceptance"], *report["speed"]) if row["error"]]
    if not found and not errors:
        return ""
    said = dict.fromkeys(f"- {row['drafter']} could not be measured: {row['error']}" for row in errors)
    runs: dict[tuple[str, str], list[str]] = {}
    for f in found:
        runs.setdefault((f["prompt"], f["error"]), []).append(f["who"])
    rows = [(prompt, ", ".join(dict.fromkeys(who)), error) for (prompt, error), who in runs.items()]
    columns = ("prompts", "engines", "why there is no answer")
    told = ["", "No figure counts these, nor their partners' runs.", "", *table(columns, rows)] if rows else []
    return _lines("## Failed", "", *said, *told)


def _speed(report: Mapping[str, Any]) -> str:
    rows = _measured(report)
    if not rows:
        return ""
    tasks, shown = list(report["tasks"]), []
    for row in rows:
        whole = row["overall"]
        estimate = whole["estimated"]
        decode = whole["decode_ratio"]
        shown.append(
            (
                *(name_of(row), f"{row['temperature']:g}", row["together"], ratio_of(whole)),
                number(whole["least_ratio"]),
                number(decode and decode["ratio"]),
                "-"
                if estimate is None
                else f"{estimate['ratio']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})",
                *(number(row[side]["tokens_per_second"], 1) for side in ("overall", "plain")),
                number(whole["tau"]),
                f"{whole['failed']} of {whole['runs']}",
            )
        )
    columns = ("drafter", "T", "at once", "ratio", "least", "decoding alone", "estimated live", "tok/s", "plain tok/s")
    said = ["## Speed", "", *table((*columns, "tau", "failed"), shown)]
    if len(tasks) > 1:
        by = [
            (
                *(name_of(row), f"{row['temperature']:g}", row["together"]),
                *(ratio_of(row["speed"][task]) for task in tasks),
            )
            for row in rows
        ]
        said += ["", "By task:", "", *table(("drafter", "T", "at once", *tasks), by)]
    return _lines(*said)


def _depths(report: Mapping[str, Any]) -> str:
    if not report["theory"]:
        return ""
    said = [
        "## Depth: theory and measurement",
        "",
        "Chains of a fixed depth in every cycle, decoding alone (prompts left out). Theory (Leviathan et al., "
        "2211.17192) takes one chance alpha for every guess; a guess costs c plain cycles. Once the rows of the "
        "target's pass are free, as there; once they have the price that the engine measured at its start, for "
        "as many of them as the drafter brought of what was asked.",
    ]
    for found in report["theory"]:
        measured = {
            row["shape"]["depth"]: row["overall"]
            for row in chains(report, found["drafter"], found["temperature"])
            if row["overall"]["decode_ratio"]
        }
        rows = []
        for point in found["points"]:
            whole = measured.get(point["depth"])
            decode = whole and whole["decode_ratio"]
            seen = "-" if decode is None else bounds(decode)
            rows.append(
                (
                    point["depth"],
                    seen,
                    *(number(point[name]) for name in ("free", "priced")),
                    number(whole and whole["tau"]),
                )
            )
        said += [
            "",
            f"{found['drafter']}, T = {found['temperature']:g}: alpha {found['alpha']:.3f}, c {found['draft']:.3f}; "
            f"{found['filled']:.0%} of the guesses asked for came.",
            "",
        ]
        said += table(("depth", "measured", "theory, rows free", "theory, rows priced", "tau"), rows)
    return _lines(*said)


def _acceptance(report: Mapping[str, Any]) -> str:
    rows, tasks = [row for row in report["acceptance"] if not row["error"]], list(report["tasks"])
    if not rows:
        return _served(report)
    shown = [
        (
            *(f"{row['temperature']:g}", row["acceptance"], _shape(row["shape"]), row["drafter"]),
            number(_mean([row["tau"][task] for task in tasks])),
            *(number(row["tau"][task]) for task in tasks),
            " ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"]),
            number(row["drafted"] / row["cycles"] if row["cycles"] else None, 1),
        )
        for row in rows
    ]
    columns = ("T", "rule", "tree", "drafter", "mean tau", *tasks, "accepted at 1, 2, ...", "drafted a cycle")
    return _lines("## Acceptance at fixed shapes", "", *table(columns, shown))


def _served(report: Mapping[str, Any]) -> str:
    """Where fixed shapes were not measured: by the runs for speed."""
    rows = [
        (
            *(name_of(row), f"{row['temperature']:g}", row["together"], number(row["overall"]["tau"])),
            " ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"]),
            number(row["drafted"] / row["cycles"] if row["cycles"] else None, 1),
        )
        for row in _measured(report)
        if row["cycles"]
    ]
    if not rows:
        return ""
    columns = ("drafter", "T", "at once", "tau", "accepted at 1, 2, ...", "drafted a cycle")
    note = (
        "The chance that a cycle keeps its i-th guess, given that it kept the one before; one without a guess has none."
    )
    return _lines("## Acceptance by position", "", note, "", *table(columns, rows))


def _ceiling(report: Mapping[str, Any]) -> str:
    """A cell: tau with so many guesses at every level; the last row of a temperature: positions in doubt."""
    tasks, rows = list(report["tasks"]), []
    for temperature, found in report["ceiling"].items():
        for k in GUESSES:
            taus = [found[task]["tau"][k] for task in tasks]
            rows.append((temperature, str(k), number(_mean(taus)), *map(number, taus)))
        doubts = [share(found[task]["doubtful"], 0) for task in tasks]
        rows.append((temperature, "positions whose likeliest token has < 1/2", "", *doubts))
    if not rows:
        return ""
    note = "With the law known and the draw not, a drafter would reach at most (at T = 0: were the text drawn):"
    return _lines(note, "", *table(("T", "guesses a level", "mean tau", *tasks), rows))


def _latency(report: Mapping[str, Any]) -> str:
    rows = []
    for row in _measured(report):
        for who, figures in ((name_of(row), row["overall"]), ("plain", row["plain"])):
            if figures["first_token"]:
                cells = (_percentiles(figures[name]) for name in ("first_token", "between", "token"))
                rows.append((who, f"{row['temperature']:g}", row["together"], *cells))
    if not rows:
        return ""
    note = (
        "Milliseconds at P50 / P95 / P99. *between*: from what one cycle brought to what the next did, a burst being "
        "one piece; *token*: each answer's mean behind its first token."
    )
    columns = ("engine", "T", "at once", "first token", "between", "token")
    return _lines("## Latency", "", note, "", *table(columns, rows))


def _percentiles(found: Mapping[str, float]) -> str:
    return " / ".join(milliseconds(found.get(name), 1) for name in PERCENTILES)


def _time(report: Mapping[str, Any]) -> str:
    rows = []
    for row in _measured(report):
        for who, figures in ((name_of(row), row["overall"]), ("plain", row["plain"])):
            parts = figures["parts"]
            if parts is not None and sum(parts[name] for name in PARTS):
                whole = sum(parts[name] for name in PARTS)
                shares = (share(parts[name] / whole) for name in PARTS)
                rows.append(
                    (who, f"{row['temperature']:g}", row["together"], *shares, share(figures["share_of_limit"]))
                )
    if not rows:
        return ""
    note = (
        "Shares of all seconds: passes with prompt rows; of the passes that only decode draft (with the planning and "
        "building of the pass, which plain decoding has too), verify, sample and what else they do; cycles in flight, "
        "whose parts nobody times here (`outrider report` does); and what is outside all passes. The read limit: the "
        "target's bytes alone, at the speed at which this device reads, by the seconds of the passes that only decode."
    )
    columns = ("engine", "T", "at once", "prompt", "draft", "verify", "sample", "other", "in flight", "outside")
    return _lines("## Where the time goes", "", note, "", *table((*columns, "of the read limit"), rows))


def _memory(report: Mapping[str, Any]) -> str:
    names = ("target", "drafter", "target_stack", "drafter_stack", "passes", "sampler", "graphs", "seats")
    rows = [
        (drafter, *(number(found["memory"][name] / 2**20, 0) for name in names))
        for drafter, found in report["engines"].items()
        if "memory" in found
    ]
    if not rows:
        return ""
    columns = ("engine", "target's weights", "drafter's weights", "target's keys", "drafter's keys", *names[4:])
    return _lines("## Memory as planned, MiB", "", *table(columns, rows))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
