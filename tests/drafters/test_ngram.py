"""Prompt lookup: the longest earlier match of the text's own end, its continuation, and how sure that is."""

from __future__ import annotations

import pytest

from outrider.drafters.ngram import MAX_MATCH, Ngram, _Index, merge
from outrider.request import Request, SamplingParams


def index(tokens: list[int]) -> _Index:
    made = _Index()
    made.extend(tokens)
    return made


def test_the_longest_match_wins_over_a_later_short_one() -> None:
    tokens = [1, 2, 3, 4, 9, 3, 4, 8, 1, 2, 3, 4]
    assert index(tokens).matches() == [(4, 4), (2, 7)]
    assert index(tokens).continuations(2, 2) == [[9, 3], [8, 1]]


def test_one_token_is_a_match_only_where_no_pair_is() -> None:
    assert index([3, 9, 7, 4, 9]).matches() == [(1, 2)]
    assert index([3, 9, 7, 4, 9]).continuations(2, 1) == [[7, 4]]
    assert index([9, 1, 4, 9, 2, 4, 9]).matches() == [(2, 4)]


def test_a_period_goes_on() -> None:
    assert index([7, 1, 2, 1, 2]).continuations(5, 1) == [[1, 2, 1, 2, 1]]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 5]])
def test_nothing_to_look_up(tokens: list[int]) -> None:
    assert index(tokens).matches() == []
    assert index(tokens).continuations(3, 2) == []


def test_the_grade_is_the_length_of_the_match() -> None:
    drafter = Ngram(None)  # type: ignore[arg-type]
    request = Request(0, tuple(range(40)), SamplingParams(), 0)
    drafter.begin(request)
    assert drafter.grade(request) == 0
    for length in range(1, 20):
        request.output = list(range(5, 5 + length))
        drafter.begin(request)
        assert drafter.grade(request) == min(length, MAX_MATCH)


def test_merged_continuations_share_their_beginnings() -> None:
    tree = merge([[1, 2, 3], [1, 2, 4], [5]], max_nodes=5)
    assert tree.tokens == (1, 2, 3, 4, 5)
    assert tree.parents == (-1, 0, 1, 1, -1)
    assert len(merge([[1, 2, 3]], max_nodes=2)) == 2
