"""The suffix automaton against naive matching; trees by frequency, and what is shared between requests."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.base import Ask, Commit
from outrider.drafters.suffix import CHAIN, History, Suffix, SuffixAutomaton
from outrider.request import FinishReason, Request, SamplingParams
from outrider.tree import Budget
from tests import toy

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def occurrences(text: list[int], part: list[int]) -> list[int]:
    """Where each occurrence ends."""
    size = len(part)
    return [end for end in range(size, len(text) + 1) if text[end - size : end] == part]


def built(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    return automaton


def state_of(automaton: SuffixAutomaton, part: list[int]) -> int | None:
    state = 0
    for token in part:
        if token not in automaton.next[state]:
            return None
        state = automaton.next[state][token]
    return state


@given(TEXTS)
@settings(max_examples=60, deadline=None)
def test_every_substring_and_no_other_is_known_with_its_count(text: list[int]) -> None:
    automaton = built(text)
    parts = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for part in parts:
        state = state_of(automaton, list(part))
        assert state is not None
        ends = occurrences(text, list(part))
        assert (automaton.count[state], automaton.latest[state]) == (len(ends), ends[-1])
        for token in range(5):
            if (*part, token) not in parts:
                assert token not in automaton.next[state]
    assert len(automaton.length) <= max(2 * len(text), 2)


@given(TEXTS)
@settings(max_examples=150, deadline=None)
def test_the_longest_suffix_that_occurs_earlier(text: list[int]) -> None:
    lengths = [n for n in range(1, len(text)) if len(occurrences(text, text[-n:])) > 1]
    assert built(text).repeated[1] == max(lengths, default=0)


@given(TEXTS, TEXTS)
@settings(max_examples=150, deadline=None)
def test_steps_keep_the_longest_match_with_another_text(text: list[int], walked: list[int]) -> None:
    automaton = built(text)
    state, length = 0, 0
    for stop, token in enumerate(walked, start=1):
        state, length = automaton.advance(state, length, token)
        matching = [n for n in range(1, stop + 1) if occurrences(text, walked[stop - n : stop])]
        assert length == max(matching, default=0)
        assert state == state_of(automaton, walked[stop - length : stop])


def test_a_text_of_one_token_costs_no_more_than_the_chain() -> None:
    automaton = built([7] * (3 * CHAIN))
    assert automaton.repeated[1] == 3 * CHAIN - 1
    assert sum(automaton.count) <= 3 * CHAIN * CHAIN


class Replay:
    """One drafter, asked without an engine."""

    def __init__(self, share_history: bool = False) -> None:
        self.drafter = Suffix(SimpleNamespace(config=SimpleNamespace(share_history=share_history)))  # type: ignore[arg-type]
        self.number = 0

    def begin(self, tokens: list[int]) -> Request:
        self.number += 1
        request = Request(self.number, tuple(tokens), SamplingParams(), 0)
        self.drafter.begin(request)
        return request

    def guess(self, request: Request, *budget, **options):
        (tree,) = self.drafter.propose([Ask(request, None, Budget(*budget, **options))])  # type: ignore[arg-type]
        assert tree.fault(100) is None
        return tree

    def finish(self, request: Request, reason: FinishReason | None = FinishReason.STOP) -> None:
        request.finish_reason = reason
        self.drafter.end(request)


def test_the_likelier_continuation_comes_first_and_the_rest_beside_it() -> None:
    replay = Replay()
    request = replay.begin([1, 2, 5, 9, 1, 2, 6, 9, 1, 2, 5, 8, 1, 2])
    assert replay.drafter.grade(request) == 2
    chain = replay.guess(request, 2, 1, 2)
    assert chain.tokens[0] == 5
    tree = replay.guess(request, 1, 2, 2)
    assert tree.tokens == (5, 6)
    assert tree.parents == (-1, -1)


def test_equally_frequent_ones_go_by_the_latest() -> None:
    replay = Replay()
    assert replay.guess(replay.begin([1, 2, 5, 1, 2, 6, 1, 2]), 1, 1, 1).tokens == (6,)


def test_a_period_goes_on() -> None:
    replay = Replay()
    assert replay.guess(replay.begin([7, 1, 2, 3, 1, 2, 3]), 7, 1, 7).tokens == (1, 2, 3, 1, 2, 3, 1)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4]])
def test_nothing_to_look_up(tokens: list[int]) -> None:
    replay = Replay()
    request = replay.begin(tokens)
    assert replay.drafter.grade(request) == 0
    assert len(replay.guess(request, 3, 2, 6)) == 0


def test_a_long_match_is_followed_far_and_a_short_one_is_not() -> None:
    story = list(range(10, 40))
    replay = Replay()
    sure = replay.guess(replay.begin([*story, 50, *story[:20]]), 8, 1, 8, prices=(0.4,))
    unsure = replay.guess(replay.begin([*story, 50, story[0]]), 8, 1, 8, prices=(0.4,))
    assert sure.tokens == tuple(story[20:28])
    assert len(unsure) < len(sure)
    assert len(replay.guess(replay.begin([*story, 50, story[0]]), 8, 1, 8, prices=(0.99,))) == 0


def test_it_learns_that_a_kind_of_match_fails() -> None:
    replay = Replay()
    request = replay.begin([1])
    lengths = []
    for step in range(80):
        tree = replay.guess(request, 1, 1, 1, prices=(0.02,))
        lengths.append(len(tree))
        request.output.append(10 + step)  # a 1 is followed by what never followed it before
        replay.drafter.observe(None, None, [Commit(request, 1, 0, ())])  # type: ignore[arg-type]
        request.output.append(1)
    assert Counter(lengths[:20])[1] > Counter(lengths[-20:])[1]


def test_past_replies_are_read_only_where_that_is_allowed() -> None:
    for share in (False, True):
        replay = Replay(share)
        first = replay.begin([1, 2])
        first.output += [30, 31, 32, 33, 34]
        replay.finish(first)
        second = replay.begin([3, 30, 31])
        assert replay.drafter.grade(second) == (2 if share else 0)
        assert replay.guess(second, 3, 1, 3).tokens == ((32, 33, 34) if share else ())


def test_a_preempted_or_aborted_reply_is_not_remembered() -> None:
    replay = Replay(True)
    first = replay.begin([1])
    first.output += [30, 31, 32]
    replay.finish(first, None)
    assert replay.drafter.grade(replay.begin([30, 31])) == 0


def test_history_is_bounded_and_forgets_the_oldest() -> None:
    history = History(max_tokens=40)
    for number in range(30):
        history.add([number, number + 100, number + 200])
        assert sum(part.length[part.last] for part in history.parts) <= 40
    known = {token for part in history.parts for token in part.next[0] if 0 <= token < 100}
    assert 29 in known
    assert 0 not in known
    history.add(list(range(1000, 1500)))
    assert sum(part.length[part.last] for part in history.parts) <= 40


def test_no_match_runs_from_one_reply_into_the_next() -> None:
    replay = Replay(True)
    for reply in ([30, 31], [40, 41]):
        request = replay.begin([1])
        request.output += reply
        replay.finish(request)
    assert len(replay.guess(replay.begin([2, 30, 31]), 3, 1, 3)) == 0


def test_through_the_engine_history_changes_no_text() -> None:
    texts = []
    for share in (False, True):
        engine = toy.make_engine("suffix", depth=5, width=2, share_history=share)
        outputs = []
        for number in range(4):
            params = SamplingParams(temperature=1.0, max_tokens=60, seed=number % 2)
            outputs += toy.run(engine, [toy.make_request(number, [1, 2, 3], params)])
        texts.append(outputs)
    assert texts[0] == texts[1]
