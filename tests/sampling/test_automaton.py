"""The token automaton: dead paths, free states, and what it refuses."""

import pytest

from outrider.errors import RequestError
from outrider.sampling.automaton import TokenAutomaton


def test_states_follow_tokens_and_dead_paths_are_none():
    automaton = TokenAutomaton(0, {0: {5: 1, 3: 0}, 1: None})
    assert automaton.start() == 0
    assert automaton.allowed(0) == (3, 5)
    assert automaton.allowed(1) is None
    assert automaton.advance(0, 5) == 1
    assert automaton.advance(1, 99) == 1
    assert automaton.advance(0, 4) is None


@pytest.mark.parametrize(
    ("initial", "transitions", "said"),
    [
        (0, {0: {1: 1}}, "no transitions"),
        (0, {}, "no transitions"),
        (0, {0: {}}, "allows no token"),
        (0, {0: {1: None}}, "None cannot be"),
    ],
)
def test_what_cannot_go_on_is_refused(initial, transitions, said):
    with pytest.raises(RequestError, match=said):
        TokenAutomaton(initial, transitions)
