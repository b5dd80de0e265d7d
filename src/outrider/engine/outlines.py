"""The one shape that all trees of a cycle in flight have: chosen on the host, from the budgets that control gave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from outrider.control.company import Bounds
from outrider.models.seats import Outline
from outrider.tree import Budget

if TYPE_CHECKING:
    from outrider.engine.step import Engine

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Of trees where control may choose any: every one has graphs of its own."""
MOST_UNREAD = 8
"""Tokens that a drafter fed from taps leaves for later at most, while nothing is guessed."""


def outline_of(
    engine: Engine, num_requests: int, budgets: Iterable[Budget], levels: int, unread: int
) -> Outline | None:
    """The trees of the next cycle; None where it is one for lockstep.

    levels: most that a seat has room for. unread: most tokens of a seat that its drafter has yet to read by then.
    """
    control, drafter, given = engine.control, engine.drafter, list(budgets)
    rows = engine.scheduler.max_rows // num_requests - 1
    deepest = max((budget.depth for budget in given), default=0)
    if drafter and drafter.needs.levels is not None:
        deepest = min(deepest, drafter.needs.levels)
    deepest = min(deepest, rows)
    if rows < 0 or deepest > levels:
        return None
    if not deepest:
        return _without_guess(bool(drafter and drafter.needs.taps), unread)
    if control.adaptive:
        deepest = max(depth for depth in DEPTHS if depth <= deepest)
    width = max(budget.width for budget in given)
    if control.adaptive:
        nodes = Bounds(width, control.nodes, engine.scheduler.max_rows).nodes_of(deepest, num_requests)
    else:
        nodes = deepest if width == 1 else min(control.nodes, deepest * width, rows)
    return Outline(min(deepest, nodes), width, nodes, max(deepest + 1, unread))


def _without_guess(has_taps: bool, unread: int) -> Outline:
    """A head that is fed from taps reads several tokens at a time, as each alone would cost it nearly as much."""
    if not has_taps:
        return Outline()
    return Outline(lags=True) if unread < MOST_UNREAD else Outline(reads=True, reach=max(MOST_UNREAD, unread))
