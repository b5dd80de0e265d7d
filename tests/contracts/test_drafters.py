"""What every drafter of the registry must keep to, whatever it guesses."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from outrider.drafters.base import Ask
from outrider.errors import RequestError
from outrider.registry import CASCADES, DRAFTERS
from outrider.request import Request, SamplingParams
from outrider.sampling.automaton import TokenAutomaton
from outrider.tree import DraftTree
from tests import toy

ALL = [*DRAFTERS, *CASCADES, "suffix+early_exit", f"small_model{toy.OTHER_WORDS}"]


class Spy:
    """Passes everything through; keeps the asks and the trees, and may replace every guess by a wrong one."""

    def __init__(self, inner, wrong: bool = False) -> None:
        self.inner, self.wrong = inner, wrong
        self.name, self.needs = inner.name, inner.needs
        self.begin, self.end, self.observe, self.place = inner.begin, inner.end, inner.observe, inner.place
        self.grade, self.seen, self.probe = inner.grade, inner.seen, inner.probe
        self.asked: list[tuple[Ask, DraftTree]] = []

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = self.inner.propose(asks)
        if self.wrong:
            trees = [DraftTree(tuple((token + 1) % toy.VOCAB for token in tree.tokens), tree.parents) for tree in trees]
        self.asked += zip(asks, trees, strict=True)
        return trees


def spied(name: str, wrong: bool = False, **settings) -> tuple[toy.Engine, Spy]:
    engine = toy.make_engine(name, **settings)
    engine.drafter = spy = Spy(engine.drafter, wrong)
    return engine, spy


def requests(count: int = 4, temperature: float = 0.0, max_tokens: int = 20):
    """Every other prompt is lines that repeat themselves, the others are any tokens."""
    rng = random.Random(6)
    prompts = [
        [rng.randrange(toy.VOCAB) for _ in range(rng.randint(1, 25))] if i % 2 else toy.lines(rng) for i in range(count)
    ]
    return [
        toy.make_request(i, prompt, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i))
        for i, prompt in enumerate(prompts)
    ]


def rate(name: str, asked: Sequence[Request]) -> float:
    """The share of its guesses that came true."""
    drafted = sum(request.tally.drafted for request in asked)
    assert drafted, f"{name} never guessed"
    return sum(request.tally.accepted for request in asked) / drafted


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_trees_keep_to_the_budget(name: str, width: int, acceptance: str) -> None:
    engine, spy = spied(name, depth=5, width=width, acceptance=acceptance)
    toy.run(engine, requests(temperature=1.0))
    assert any(len(tree) for _, tree in spy.asked), f"{name} never guessed"
    for ask, tree in spy.asked:
        assert tree.fault(toy.VOCAB) is None
        assert len(tree) <= ask.budget.nodes
        assert max(tree.depths(), default=0) <= ask.budget.depth
        for node in range(-1, len(tree)):
            assert len(tree.children(node)) <= ask.budget.width


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [1, 3])
def test_wrong_guesses_leave_no_trace_in_the_targets_stack(name: str, width: int) -> None:
    """Fault 13: every guess is rejected; the stack over [0, committed) equals that of plain decoding, bit for bit."""
    stacks = []
    for engine in (toy.make_engine(), spied(name, wrong=True, width=width)[0]):
        asked = requests(count=3)
        for request in asked:
            engine.add(request)
        contents: dict[int, list[torch.Tensor]] = {}
        while not engine.scheduler.is_idle:
            engine.step()
            for request in engine.scheduler.running:
                key = (request.id, "target")
                slots = engine.ledger.slots(key, 0, engine.ledger[key].committed)
                contents[request.id] = [tensor[slots].clone() for tensor in (*engine.pages.keys, *engine.pages.values)]
        stacks.append((contents, [request.output for request in asked]))
    assert stacks[0][1] == stacks[1][1]
    for number, plain in stacks[0][0].items():
        shortest = min(len(plain[0]), len(stacks[1][0][number][0]))
        assert shortest > 0
        for a, b in zip(plain, stacks[1][0][number], strict=True):
            assert torch.equal(a[:shortest], b[:shortest])


@pytest.mark.parametrize("name", ALL)
def test_a_drafter_lags_and_catches_up(name: str) -> None:
    """Depth 0 for a while, then guesses again: as good as a drafter that was never away."""
    rates = []
    for pause in (False, True):
        engine = toy.make_engine(name, depth=3)
        budget = engine.control.budget
        cycle = iter(range(10_000))
        if pause:
            engine.control.budget = lambda *asked: {} if next(cycle) % 6 < 3 else budget(*asked)  # noqa: B023
        asked = requests(count=4, temperature=1.0, max_tokens=80)
        toy.run(engine, asked)
        rates.append(rate(name, asked))
    assert rates[1] == pytest.approx(rates[0], abs=0.15)


@pytest.mark.parametrize("name", ALL)
def test_a_prefix_that_a_plain_request_left_is_caught_up_with(name: str) -> None:
    """No stale keys: after it, guesses are as good as over a prefix that the drafter saw itself."""
    rates = []
    for plain in (True, False):
        engine = toy.make_engine(name, depth=4)
        prompt = [(7 * i) % toy.VOCAB for i in range(30)]
        first = SamplingParams(max_tokens=8, temperature=1.0, seed=3, speculation=not plain)
        toy.run(engine, [toy.make_request(0, prompt, first)])
        asked = [
            toy.make_request(i, [*prompt, i], SamplingParams(max_tokens=40, temperature=1.0, seed=i)) for i in (1, 2)
        ]
        toy.run(engine, asked)
        assert all(request.num_cached == 28 for request in asked)
        rates.append(rate(name, asked))
    # What a cascade learned of its two from the first request may send a guess to the other one.
    assert rates[0] == pytest.approx(rates[1], abs=0.05 if "+" in name else 0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_a_grammar_that_names_a_foreign_token_fails_its_own_request_alone(
    name: str, width: int, acceptance: str
) -> None:
    automaton = TokenAutomaton(0, {0: {5: 1}, 1: {6: 2}, 2: {toy.VOCAB: 0, 3: 0}})
    engine = toy.make_engine(name, depth=4, width=width, acceptance=acceptance)
    bad = toy.make_request(0, [1, 2], SamplingParams(temperature=1.0, max_tokens=9, automaton=automaton))
    good = toy.make_request(1, [1, 2], SamplingParams(max_tokens=9))
    toy.run(engine, [bad, good])
    assert (bad.output, type(bad.error)) == ([5, 6], RequestError)
    assert len(good.output) == 9


@pytest.mark.parametrize("name", ALL)
def test_a_request_may_end_at_any_time(name: str) -> None:
    engine, _ = spied(name)
    for steps in range(6):
        (request,) = requests(count=1)
        request.id = 100 + steps
        engine.add(request)
        for _ in range(steps):
            engine.step()
        engine.abort(request)
        engine.ledger.check()
        assert engine.scheduler.is_idle
        assert engine.ledger.pool.num_held == 0
