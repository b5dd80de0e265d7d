"""The one shape of a flight's trees: what budgets ask for, never a few rows beyond a power of two."""

from __future__ import annotations

import pytest

from outrider.engine.outlines import MOST_UNREAD, outline_of
from outrider.models.seats import Outline
from outrider.tree import Budget
from tests import toy


def chosen(num_requests: int, depth: int, width: int, nodes: int, unread: int = 1, adaptive: bool = True) -> Outline:
    engine = toy.make_engine("eagle3", depth=16, width=width, in_flight=2, adaptive=adaptive)
    engine.control.nodes = nodes
    budgets = [Budget(depth, width, depth * width)] * num_requests if depth else []
    found = outline_of(engine, num_requests, budgets, 16, unread)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("num_requests", "depth", "width", "nodes", "expected"),
    [(1, 8, 4, 32, 31), (1, 8, 4, 31, 31), (1, 4, 4, 64, 15), (1, 5, 4, 64, 20), (2, 4, 4, 64, 15), (1, 3, 1, 64, 3)],
)
def test_a_tree_leaves_out_the_few_rows_that_would_make_a_pass_dearer(num_requests, depth, width, nodes, expected):
    assert chosen(num_requests, depth, width, nodes).nodes == expected
    assert chosen(num_requests, depth, width, nodes, adaptive=False).nodes == min(depth * width, nodes)


def test_without_a_guess_what_is_said_waits_until_it_is_worth_a_pass():
    assert chosen(1, 0, 1, 1, unread=MOST_UNREAD - 1) == Outline(lags=True)
    assert chosen(1, 0, 1, 1, unread=MOST_UNREAD) == Outline(reads=True, reach=MOST_UNREAD)
    assert chosen(1, 2, 1, 2, unread=6).reach == 6
