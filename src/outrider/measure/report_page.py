"""A report of `gpu_report` as sections of a page: tables for readers, and plots where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.measure import page
from outrider.measure.bars import bars
from outrider.measure.page import Plot, Section, milliseconds, number, share, table
from outrider.measure.plots import Curve, can_draw, curves, stacked
from outrider.measure.random_rows import NO_MEANING

PARTS = ("target", "draft", "rest")
"""Of a cycle."""


def markdown(report: Mapping[str, Any]) -> str:
    """All figures in tables; milliseconds, and shares of the read limit."""
    return page.markdown(sections(report, plots=False))


def sections(report: Mapping[str, Any], plots: bool = True) -> list[Section]:
    """All of a report; drawing takes a moment, so plots may be left out while one is being measured."""
    draw = plots and can_draw()
    texts = (_head, _bars, _start, _passes, _decoding, _speculative, _shapes, _random, _peers, _elapsed)
    drawn = {_passes: _by_rows, _speculative: _cycles}
    return [
        Section("\n".join(write(report)), list(drawn[write](report)) if draw and write in drawn else ())
        for write in texts
    ]


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    resolved, limit = report["resolved"], report["limit"]
    yield f"# {resolved['model']} on {report['device']}"
    yield ""
    yield f"{resolved['dtype']}, {resolved['numerics']}; exact by {resolved['exactness']}."
    versions = ", ".join(f"{name} {version}" for name, version in resolved["versions"].items())
    yield f"Versions: {versions}."
    rate, size = limit["bytes_per_second"] / 1e9, limit["nbytes"] / 2**20
    yield f"Read limit: {rate:,.0f} GB/s ({limit['way']}, {size:,.0f} MiB)."
    yield f"A pass streams {report['streamed_bytes'] / 1e9:.3f} GB of weights, and its keys and values."
    twin = report["twin"]
    if twin is not None:
        yield (
            f"**Widened twin of {twin['original']} (plan {twin['plan']})**: says what the original says, costs what "
            "its shape costs."
        )
        if "texts" in twin:
            margins = ", ".join(f"{margin:.3f}" for margin in twin["margins"]) or "none"
            yield (
                f"Against the original in the same arithmetic: {twin['differing']} of {twin['texts']} texts differ, "
                f"{twin['tokens_alike']:.2%} of tokens come before a difference; margins of the greedy ones: {margins}."
            )
    yield from (f"Note: {note}." for note in (*resolved["notes"], *report["notes"]))


def _start(report: Mapping[str, Any]) -> Iterator[str]:
    memory = ", ".join(f"{purpose} {amount}" for purpose, amount in _memory(report["resolved"]["memory"]))
    yield f"Memory as planned, MiB: {memory}."
    if not report["starts"]:
        return
    yield from ("", "## From the command to the first token, plain decoding, seconds", "")
    yield "Weights may lie in the system's own cache both times; CUDA graphs are taken anew at every start."
    yield ""
    rows = []
    for start in report["starts"]:
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in start["parts"].items())
        rows.append((start["kind"], number(start["seconds"]), start["error"] or parts))
    yield from table(("start", "s", "parts"), rows)


def _memory(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Bytes by purpose; what else a plan holds are counts and words."""
    stacks, work = ("target_stack", "drafter_stack"), ("graphs", "passes", "sampler", "seats")
    for name in ("target", "drafter", *stacks, *work, "margin", "free"):
        yield name.replace("_", " "), f"{plan[name] / 2**20:,.0f}"


def _random(report: Mapping[str, Any]) -> Iterator[str]:
    found = report["random"]
    if not found:
        return
    yield from ("", f"## Other kinds of models ({NO_MEANING})", "")
    rows = []
    for r in (r for r in found if "error" not in r):
        one, wide = (
            f"{milliseconds(p['seconds'])} ({share(p['share_of_limit'])})" for p in (r["passes"][0], r["passes"][-1])
        )
        width = "any" if r["fixed_width"] is None else f"{r['fixed_width']} rows"
        ratio = r["passes"][-1]["seconds"] / r["passes"][0]["seconds"]
        speed = [f"{r['plain']['tokens_per_second']:,.1f}", share(r["share_of_limit"])]
        size = f"{r['nbytes'] / 1e9:.1f}"
        rows.append((r["what"], f"{r['way']}, {width}", size, f"{r['context']:,}", *speed, one, wide, f"{ratio:.3f}"))
    columns = ("model", "way", "GB", "context", "plain tok/s", "of the limit", "a row, ms", "wide, ms", "x one row")
    yield from table(columns, rows)
    yield from (f"- {r['what']}: {r['error']}" for r in found if "error" in r)
    yield from (f"- {r['what']}: {note}" for r in found for note in r.get("notes", ()))


def _passes(report: Mapping[str, Any]) -> Iterator[str]:
    plain = report["passes"][0]["seconds"]
    yield from ("", f"## Passes, context {report['context']:,}, every row with logits", "")
    rows = [
        (
            p["requests"],
            p["rows"],
            milliseconds(p["seconds"]),
            milliseconds(p["queued"]),
            f"{p['seconds'] / plain:.3f}",
            share(p["share_of_limit"]),
        )
        for p in report["passes"]
    ]
    yield from table(("requests", "rows of each", "ms", "ms queued", "x one row", "of the limit"), rows)


def _decoding(report: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## Plain decoding", "")
    rows = [
        (
            r["law"],
            r["together"],
            _way(r),
            f"{r['tokens_per_second']:,.1f}",
            *_cycle(r),
            share(r["share_of_limit"]),
        )
        for r in report["plain"]
    ]
    yield from table(("law", "at once", "way", "tok/s", "cycle ms", *PARTS, "of the limit"), rows)


def _speculative(report: Mapping[str, Any]) -> Iterator[str]:
    found = report["speculative"]
    if not found:
        return
    yield from (
        "",
        "## Speculative decoding",
        "",
        "The bound is tau x t_plain / (t_verify + t_draft + t_rest): in lockstep t_verify is that of passes alone; in "
        "flight their sum is what a cycle takes the device, and parts are timed alone, the rest being all else.",
        "",
    )
    speed = ("tau", "tok/s", "x plain", "of bound")
    columns = ("drafter", "law", "at once", "way", *speed, "cycle ms", *PARTS, "level", "texts")
    yield from table(columns, [_row(r) for r in found if "error" not in r])
    yield from (f"- {r['drafter']}: {r['error']}" for r in found if "error" in r)


def _row(r: Mapping[str, Any]) -> Sequence[str]:
    level = "-" if r["level"] is None else f"{milliseconds(r['level'])} ({share(r['level_share_of_limit'])})"
    texts = r["synthetic"] or f"{r['differing_texts']} differ"
    name = f"{r['drafter']}, {r['synthetic']}" if r["synthetic"] else r["drafter"]
    ratio = [number(r["ratio"]), share(r["share_of_bound"])]
    speed = [f"{r['tau']:.2f}", f"{r['tokens_per_second']:,.1f}", *ratio]
    return [name, r["law"], str(r["together"]), _way(r), *speed, *_cycle(r), level, texts]


def _shapes(report: Mapping[str, Any]) -> Iterator[str]:
    found = report["shapes"]
    if not found:
        return
    yield from ("", "## Cycles in flight by the shape of their trees, one request, milliseconds", "")
    rows = [
        (
            r["drafter"],
            r["law"],
            r["levels"],
            r["nodes"],
            *_cycle(r),
            milliseconds(r["device"]),
            milliseconds(r["rest_on_device"]),
        )
        for r in found
        if "error" not in r
    ]
    columns = ("drafter", "law", "levels", "nodes", "cycle", *PARTS, "cycle on the device alone", "its rest")
    yield from table(columns, rows)
    yield from (f"- {r['drafter']}, {r['law']}: {r['error']}" for r in found if "error" in r)


def _bars(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [(b.what, b.found, b.wanted, "kept" if b.kept else "**missed**") for b in bars(report)]
    if rows:
        yield from ("", "## Bars", "")
        yield from table(("what", "found", "wanted", ""), rows)


def _elapsed(report: Mapping[str, Any]) -> Iterator[str]:
    parts = report["elapsed"]
    yield from ("", f"## Seconds of this report: {sum(p['seconds'] for p in parts):,.0f}", "")
    yield from table(("part", "s"), [(p["part"], f"{p['seconds']:.1f}") for p in parts])


def _peers(report: Mapping[str, Any]) -> Iterator[str]:
    if not report["peers"]:
        return
    yield from ("", "## Others, on the same device and prompts", "")
    names = ("engine", "tok/s", "with prompts read", "note")
    rows = [
        (p["name"], *(number(p.get(key), 1) for key in ("decoding", "tokens_per_second")), p["error"] or "")
        for p in report["peers"]
    ]
    yield from table(names, rows)


def _by_rows(report: Mapping[str, Any]) -> Iterator[Plot]:
    """Passes by rows and by requests, each beside its limit."""
    rate = report["limit"]["bytes_per_second"]
    one = [p for p in report["passes"] if p["requests"] == 1]
    many = [report["passes"][0], *(p for p in report["passes"] if p["requests"] > 1)]
    found = []
    for series, (name, passes, key) in enumerate(
        (("rows of one request", one, "rows"), ("requests of one row", many, "requests"))
    ):
        rows = [p[key] for p in passes]
        found.append(Curve(name, rows, [1e3 * p["seconds"] for p in passes], series=series))
        limit = [1e3 * p["nbytes"] / rate for p in passes]
        found.append(Curve(f"{name}: read limit", rows, limit, is_theory=True, series=series))
    caption = f"Milliseconds of a pass behind {report['context']:,} known tokens, and what reading its bytes takes."
    yield Plot(curves(found, "rows", "milliseconds a pass", doubling=True), caption)


def _cycles(report: Mapping[str, Any]) -> Iterator[Plot]:
    """The parts of cycles, plain and speculative."""
    rows = [*report["plain"], *(r for r in report["speculative"] if "error" not in r)]
    names = [f"{r['drafter']}{'*' if r['synthetic'] else ''}, {r['law']}, {r['together']} at once" for r in rows]
    parts = {part: [1e3 * r[part] for r in rows] for part in PARTS}
    caption = "Milliseconds of a cycle by its parts. * synthetic acceptance: output not valid."
    yield Plot(stacked(names, parts, "milliseconds a cycle"), caption, is_wide=True)


def _cycle(row: Mapping[str, Any]) -> list[str]:
    return [milliseconds(row[name]) for name in ("cycle", *PARTS)]


def _way(row: Mapping[str, Any]) -> str:
    return row["way"] if row["in_flight"] in (0, 1) else f"{row['way']} ({row['in_flight']:.0%})"
