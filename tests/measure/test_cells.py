"""Control beside the better of plain decoding and fixed depths: each figure recomputed by hand."""

from __future__ import annotations

import pytest

from outrider.measure.bench import Figures
from outrider.measure.cells import cells, summary, verdict
from outrider.measure.cells_page import foretold, never_slower
from outrider.measure.contenders import Run
from outrider.measure.intervals import quotient_of
from outrider.measure.survey import Row, Shape, Variant
from outrider.record import Tally


def figures(seconds: list[float], gap: float, failed: int | None = None) -> Figures:
    """Runs of 10 tokens, each gap of which was as long."""
    runs = [Run(10, each, gaps=(gap,) * 9, between=(gap,)) for each in seconds]
    if failed is not None:
        runs[failed] = Run(error="no room")
    return Figures(runs, [(0, "p")] * len(runs))


def row(drafter: str, mine: Figures, plain: Figures, depth: int | None = None, tallied: bool = True) -> Row:
    shape = None if depth is None else Shape(depth, 1, depth)
    variant = Variant(drafter, 0.0, shape=shape, together=4)
    return Row(variant, {"a": Tally(cycles=9, accepted=0)} if tallied else {}, {"a": (mine, plain)})


PLAIN = figures([2.0, 2.0, 4.0, 2.0, 2.0], 0.2)
CONTROL = figures([2.0, 1.6, 3.0, 2.0, 1.0], 0.3, failed=4)
FAST = figures([1.0, 2.0, 2.0, 2.0, 2.0], 0.25)
"""In all 9 seconds of 50 tokens, against plain decoding's 12."""
ROWS = [
    row("ngram", CONTROL, PLAIN),
    row("ngram", FAST, PLAIN, depth=2),
    row("ngram", figures([9.0] * 5, 0.9), PLAIN, depth=8),
    row("none", figures([2.5, 2.5, 4.0, 2.0, 2.0], 0.2), PLAIN),
    row("transformers", figures([0.1] * 5, 0.1), PLAIN, tallied=False),
    row("suffix", CONTROL, figures([2.0] * 5, 0.2)),  # nobody else in its turns
]


def test_control_stands_beside_the_best_of_its_own_turns():
    (cell,) = cells(ROWS)
    assert (cell["task"], cell["together"], cell["drafter"], cell["runs"]) == ("a", 4, "ngram", 4)
    assert set(cell["tokens_per_second"]) == {"control", "plain", "ngram, chain 2", "ngram, chain 8", "plain again"}
    assert cell["best"] == "ngram, chain 2"
    # Turns that both answered: 1/2, 2/1.6, 2/3, 2/2; the median of those is 5/6. No bounds for fewer than five.
    assert cell["ratio"] == {"ratio": pytest.approx((2 / 3 + 1) / 2), "low": None, "high": None}
    assert cell["ratios"]["plain"]["ratio"] == pytest.approx((1 + 1.25) / 2)
    assert cell["noise"]["ratio"]["ratio"] == pytest.approx(1.0)
    assert cell["noise"]["ratio"]["low"] == pytest.approx(0.8)


def test_waits_are_compared_with_the_evenest():
    (cell,) = cells(ROWS)
    assert cell["evenest"] == "plain"
    assert cell["p99_ratio"]["ratio"] == pytest.approx(0.2 / 0.3)
    assert cell["token_p99_ratio"]["ratio"] == pytest.approx(0.2 / 0.3)
    assert cell["noise"]["p99"]["ratio"] == pytest.approx(1.0)


def test_an_answer_is_yes_or_no_only_where_it_is_sure():
    assert verdict({"ratio": 0.98, "low": 0.9, "high": 1.1}) == "yes"
    assert verdict({"ratio": 0.9, "low": 0.8, "high": 0.99}) == "not surely"
    assert verdict({"ratio": 0.9, "low": None, "high": None}) == "not surely"
    assert verdict({"ratio": 0.9, "low": 0.8, "high": 0.97}) == "no"
    good = {"task": "b", "temperature": 1.0, "together": 1, "ratio": {"ratio": 1.2, "low": 1.1, "high": 1.3}}
    bad = {"task": "a", "temperature": 0.0, "together": 64, "ratio": {"ratio": 0.9, "low": 0.8, "high": 0.95}}
    found = summary([good, bad])["ratio"]
    assert (found["cells"], found["reached"], found["missed"]) == (2, 1, 1)
    assert (found["worst"]["together"], found["worst"]["ratio"]) == (64, 0.9)


def test_a_run_in_which_all_failed_has_no_ratio():
    nothing = Figures([Run(error="no")] * 5, [(0, "p")] * 5)
    (cell,) = cells([row("ngram", nothing, PLAIN), row("ngram", FAST, PLAIN, depth=2)])
    assert "ratio" not in cell
    assert "| failed | - |" in never_slower({"cells": [cell]})


def test_the_page_tells_the_worst_cell_and_the_noise():
    text = never_slower({"cells": cells(ROWS)})
    assert "0 of 1 cells reach 0.98, 0 surely do not; the worst is 0.83, a, T = 0, 4 at once." in text
    assert "| ngram, chain 2 | 0.83 | not surely |" in text
    assert never_slower({"cells": []}) == ""


def test_percentiles_are_divided_over_all_runs_of_a_side():
    """By hand: of 100 values each, all of runs drawn anew alike, so that there is nothing to resample."""
    assert quotient_of(50, [[2.0, 4.0]] * 5, [[1.0, 3.0]] * 5).ratio == pytest.approx(1.5)
    found = quotient_of(100, [[1.0], [1.0], [1.0], [1.0], [3.0]], [[1.0]] * 5)
    assert (found.ratio, found.low, found.high) == (3.0, 1.0, 3.0)  # 0.8^5 = 33 % of draws miss the long one
    assert quotient_of(99, [[1.0]], [[2.0]]).low is None
    assert quotient_of(99, [[]], [[]]) is None


def test_misses_are_told_by_kind():
    runs = [Run(5, 1.0, misses=((0.1, 0.3), (0.5,))), Run(5, 1.0, misses=((0.2,), ()))]
    told = Figures(runs, [(0, "p"), (1, "q")]).misses()
    assert told["plain"] == {"cycles": 3, "median": 0.2}
    assert told["guessing"] == {"cycles": 1, "median": 0.5}
    assert told["all"] == {"cycles": 4, "median": 0.25}
    shown = {"error": None, "temperature": 0.0, "together": 1, "overall": {"price_misses": told}}
    assert "| x | 0 | 1 | 4 | 25.0% | 3 | 20.0% | 1 | 50.0% |" in foretold({"speed": [shown]}, lambda row: "x")
    assert foretold({"speed": [{"error": "no weights"}]}, lambda row: "x") == ""
