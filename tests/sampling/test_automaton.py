"""The token automaton: dead paths, free states, and what it refuses."""

import pytest

from outrider.errors import RequestError
from outrider.registry import DRAFTERS
from outrider.request import SamplingParams
from outrider.sampling.automaton import TokenAutomaton
from tests.toy import make_engine, make_request, run


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


class Failing:
    """Allows everything and raises, as a caller's own program may, in one verb from its `after`-th call on."""

    def __init__(self, verb: str, after: int) -> None:
        self.verb, self.left = verb, after

    def _call(self, verb, answer):
        if verb == self.verb:
            self.left -= 1
            if self.left < 0:
                raise KeyError("boom")
        return answer

    def start(self):
        return self._call("start", 0)

    def advance(self, state, token):
        return self._call("advance", 0)

    def allowed(self, state):
        return self._call("allowed", None)


def test_one_that_raises_fails_its_own_request_with_a_sentence():
    healthy = run(make_engine("ngram"), [make_request(0, (1, 2, 1), SamplingParams(max_tokens=9))])[0]
    for verb in ("advance", "allowed"):
        for after in (0, 3):
            engine = make_engine("ngram")
            broken = make_request(0, (1, 2, 1), SamplingParams(max_tokens=9, automaton=Failing(verb, after)))
            beside = make_request(1, (1, 2, 1), SamplingParams(max_tokens=9))
            run(engine, [broken, beside])
            assert beside.output == healthy
            assert f"the automaton failed in {verb} (KeyError: 'boom')" in str(broken.error)
            assert broken.output == healthy[: len(broken.output)]
            assert len(broken.output) < 9
    with pytest.raises(RequestError, match="failed in start"):
        make_engine().add(make_request(0, (1,), SamplingParams(automaton=Failing("start", 0))))


def test_one_that_raises_on_a_guess_alone_changes_nothing():
    """What an automaton says of a token that the target does not draw is nobody's business."""

    class Strict:
        def start(self):
            return ()

        def advance(self, state, token):
            said = (*state, token)
            assert list(said) == plain[: len(said)], "this token was never allowed"
            return said

        def allowed(self, state):
            return plain[len(state) : len(state) + 1] or None

    plain = run(make_engine(), [make_request(0, (1, 2, 1), SamplingParams(max_tokens=9))])[0]
    params = SamplingParams(max_tokens=9, automaton=Strict())
    for drafter in DRAFTERS:
        request = make_request(0, (1, 2, 1), params)
        assert run(make_engine(drafter), [request]) == [plain]
        assert request.error is None


def test_one_that_forbids_what_it_allowed_is_told_so():
    class Moody(Failing):
        def advance(self, state, token):
            return None

    request = make_request(0, (1, 2), SamplingParams(max_tokens=9, automaton=Moody("none", 0)))
    run(make_engine(), [request])
    assert "allowed token" in str(request.error)
