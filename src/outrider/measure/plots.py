"""Plots as SVG that stands within a page and wears its colours; drawn by matplotlib, where it is installed."""

from __future__ import annotations

import importlib.util
import io
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

MISSING = 'Plots need matplotlib: install "outrider[report]".'
WEAR: Mapping[str, str] = MappingProxyType(
    {
        "#010101": "var(--ink)",
        "#020202": "var(--faint)",
        "#030303": "var(--line)",
        "#0a0a01": "var(--s1)",
        "#0a0a02": "var(--s2)",
        "#0a0a03": "var(--s3)",
        "#0a0a04": "var(--s4)",
        "#0a0a05": "var(--s5)",
        "#0a0a06": "var(--s6)",
    }
)
"""Colours that are drawn with, and those of the page that take their place, so that light and dark both fit."""
INK, FAINT, LINE, *SERIES = WEAR
MARKERS = ("o", "s", "^", "D", "v", "P")
"""Series are told apart by more than colour."""
SIZE = (5.6, 3.5)
ROW, FRAME = 0.34, 1.0
"""Inches of a row of bars, and of what is around them."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one series.

    Attributes:
        bounds: low and high of each point, None where there are none. is_theory: drawn as a thin line without points.
        series: number of its colour.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    bounds: Sequence[tuple[float, float] | None] = ()
    is_theory: bool = False
    series: int = 0
    dash: str = "--"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def curves(
    found: Sequence[Curve], x: str, y: str, even: float | None = None, doubling: bool = False, level: Any = None
) -> str:
    """Curves over one axis; `even` is a line across, such as plain decoding's 1, `level` a (name, value) of another.

    doubling: the axis is of powers, each twice the last.
    """
    return _drawn(SIZE, lambda axes: _curves(axes, found, x, y, even, doubling, level))


def dots(names: Sequence[str], groups: Mapping[str, Sequence[Any]], x: str, even: float | None = None) -> str:
    """Values with their bounds, a row a name: by group, (value, low, high) or None a name."""
    return _drawn((SIZE[0], FRAME + ROW * len(names)), lambda axes: _dots(axes, names, groups, x, even))


def stacked(names: Sequence[str], parts: Mapping[str, Sequence[float]], x: str) -> str:
    """Bars made of parts, a row a name."""
    return _drawn((2 * SIZE[0], FRAME + ROW * len(names)), lambda axes: _stacked(axes, names, parts, x))


def _curves(axes: Any, found: Any, x: str, y: str, even: float | None, doubling: bool, level: Any) -> None:
    if even is not None:
        axes.axhline(even, color=FAINT, linewidth=1)
    if level is not None:
        axes.axhline(level[1], color=SERIES[0], linewidth=1.2, linestyle=":", label=level[0])
    dodged = sum(bool(curve.bounds) for curve in found) > 1
    for curve in found:
        color = SERIES[curve.series % len(SERIES)]
        if curve.is_theory:
            axes.plot(curve.x, curve.y, curve.dash, color=color, linewidth=1.2, label=curve.name)
            continue
        marker = MARKERS[curve.series % len(MARKERS)]
        xs = _dodged(found, curve, doubling) if dodged else curve.x
        axes.plot(xs, curve.y, "-", marker=marker, markersize=5, color=color, linewidth=1.8, label=curve.name)
        for place, value, bounds in zip(xs, curve.y, curve.bounds or [None] * len(curve.x), strict=True):
            if bounds is not None:
                around = [[value - bounds[0]], [bounds[1] - value]]
                axes.errorbar([place], [value], yerr=around, color=color, capsize=3, linewidth=1.2)
    ticks = sorted({float(place) for curve in found for place in curve.x})
    if doubling:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel=x, ylabel=y)
    axes.set_ylim(bottom=0)
    if len(found) + (level is not None) > 1:
        axes.legend(loc="best")


def _dodged(found: Sequence[Curve], curve: Curve, doubling: bool) -> list[float]:
    """Places a little beside those of other series, so that bounds do not hide one another."""
    if doubling:
        return [x * 2 ** (0.06 * curve.series) for x in curve.x]
    everything = [x for each in found for x in each.x]
    return [x + 0.012 * curve.series * (max(everything) - min(everything)) for x in curve.x]


def _dots(axes: Any, names: Sequence[str], groups: Mapping[str, Any], x: str, even: float | None) -> None:
    if even is not None:
        axes.axvline(even, color=FAINT, linewidth=1)
    step = 0.6 / max(1, len(groups))
    for series, (group, values) in enumerate(groups.items()):
        color, marker = SERIES[series % len(SERIES)], MARKERS[series % len(MARKERS)]
        known = [(i + step * (series - (len(groups) - 1) / 2), v) for i, v in enumerate(values) if v is not None]
        axes.plot([v[0] for _, v in known], [i for i, _ in known], marker, color=color, markersize=5, label=group)
        for place, (_, low, high) in known:
            if low is not None:
                axes.plot([low, high], [place, place], "-", color=color, linewidth=1.4)
    _rows(axes, names, x)
    if len(groups) > 1:
        axes.legend(loc="best")


def _stacked(axes: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]], x: str) -> None:
    start = [0.0] * len(names)
    for series, (part, values) in enumerate(parts.items()):
        axes.barh(range(len(names)), values, left=start, height=0.62, color=SERIES[series % len(SERIES)], label=part)
        start = [a + b for a, b in zip(start, values, strict=True)]
    _rows(axes, names, x)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _rows(axes: Any, names: Sequence[str], x: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel(x)
    axes.grid(visible=False, axis="y")


def _drawn(size: tuple[float, float], draw: Any) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    looks: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "outrider", "font.size": 9.5, "text.color": INK}
    looks |= {"axes.labelcolor": INK, "xtick.color": FAINT, "ytick.color": FAINT, "axes.edgecolor": LINE}
    looks |= {"xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.facecolor": "none", "figure.facecolor": "none"}
    looks |= {"grid.color": LINE, "axes.grid": True, "axes.axisbelow": True, "legend.frameon": False}
    looks |= {"axes.spines.top": False, "axes.spines.right": False, "font.family": "sans-serif"}
    with rc_context(looks):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return _within(written.getvalue())


def _within(svg: str) -> str:
    """A drawing that may stand in a page beside others: without a head of its own, in the page's colours, its names for
    its parts no one else's, and with no fixed size."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    for drawn, worn in WEAR.items():
        svg = svg.replace(drawn, worn)
    mark = f"p{zlib.crc32(svg.encode()):08x}-"
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{mark}\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{mark}", svg)
    head, _, rest = svg.partition(">")
    return re.sub(r' (?:width|height)="[^"]*"', "", head) + ">" + rest
