"""A report as Markdown, and as one HTML file that needs nothing else: shared by all reports of this package."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

STYLE = """
:root { color-scheme: light dark; --paper: light-dark(#fbfbf9, #16181a); --raised: light-dark(#ffffff, #1e2124);
  --ink: light-dark(#1c1e21, #e6e7e8); --faint: light-dark(#5d636b, #9aa1a9); --line: light-dark(#dcdedb, #33373b);
  --s1: light-dark(#0b6b40, #4cc38a); --s2: light-dark(#b04a12, #f0a35e); --s3: light-dark(#2b5fb0, #82b1ff);
  --s4: light-dark(#8a3d8f, #dc9fe3); --s5: light-dark(#6a6400, #d3cc5a); --s6: light-dark(#b3261e, #ff8a80);
  font: 16px/1.55 system-ui, sans-serif; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; background: var(--paper); color: var(--ink); }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .8rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
p, li { max-width: 46rem; }
code { font: .88em ui-monospace, monospace; overflow-wrap: anywhere; }
.table { overflow-x: auto; margin: .8rem 0; border: 1px solid var(--line); border-radius: 8px;
  background: var(--raised); }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; }
td.right, th.right { text-align: right; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: .8rem;
  align-items: start; }
figure { margin: 0; padding: .8rem; border: 1px solid var(--line); border-radius: 8px; background: var(--raised); }
figure.wide { grid-column: 1 / -1; }
figcaption { color: var(--faint); font-size: .85rem; margin-top: .3rem; }
figure svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
@media print { body { max-width: none; } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The page asks nobody for anything."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing with what it says, also to whoever cannot see it. is_wide: takes a row of its own."""

    svg: str
    caption: str
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report: Markdown, with or without a heading of its own, and plots, which only HTML shows."""

    text: str
    plots: Sequence[Plot] = field(default=())


def markdown(sections: Sequence[Section]) -> str:
    """The report without its plots."""
    return "\n\n".join(section.text.strip("\n") for section in sections if section.text.strip()) + "\n"


def page(title: str, sections: Sequence[Section]) -> str:
    """The report as one HTML file; its looks follow the reader's choice of light or dark."""
    from markdown_it import MarkdownIt

    write = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = "".join(_tables(write.render(section.text)) + _plots(section.plots) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def _tables(body: str) -> str:
    """Wide tables scroll by themselves; columns that Markdown aligns say so by a class, as no style may be inline."""
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    return re.sub(r' style="text-align:(\w+)"', r' class="\1"', body)


def _plots(plots: Sequence[Plot]) -> str:
    if not plots:
        return ""
    figures = (
        f"<figure{' class=' + chr(34) + 'wide' + chr(34) if plot.is_wide else ''}>{_named(plot, index)}"
        f"<figcaption>{html.escape(plot.caption)}</figcaption></figure>\n"
        for index, plot in enumerate(plots)
    )
    return f'<div class="plots">\n{"".join(figures)}</div>\n'


def _named(plot: Plot, index: int) -> str:
    """The drawing, which says what it shows to whoever cannot see it."""
    return plot.svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(plot.caption)}" ', 1)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """A table in Markdown, line by line; columns of figures stand to the right."""
    cells = [[_cell(str(cell)) for cell in row] for row in rows]
    is_figures = [all(_is_figure(row[i]) for row in cells) and bool(cells) for i in range(len(columns))]
    yield f"| {' | '.join(map(_cell, columns))} |"
    yield f"|{''.join('---:|' if right else '---|' for right in is_figures)}"
    yield from (f"| {' | '.join(row)} |" for row in cells)


def _cell(text: str) -> str:
    """A task's name or an error may hold what would end the cell."""
    return " ".join(text.replace("|", "\\|").split())


def _is_figure(cell: str) -> bool:
    return re.fullmatch(r"\W*(\d[\d.,%x /]*( (?:to|of) [\d.]+| \([^)]*\))*)?\W*", cell) is not None


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def milliseconds(seconds: float | None, digits: int = 3) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.{digits}f}"


def share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"
