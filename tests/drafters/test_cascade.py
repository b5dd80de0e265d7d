"""Cascades: who is asked, what serves both, and which two cannot be joined."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.cache.pages import PageSpec
from outrider.config import EngineConfig
from outrider.drafters.base import Ask, Commit, Drafter, Needs, graded
from outrider.drafters.cascade import Cascade
from outrider.errors import ConfigError
from outrider.request import Request, SamplingParams
from outrider.tree import Budget, DraftTree
from tests import toy


class Fixed(Drafter):
    """Says one token, with one grade."""

    def __init__(self, name: str, token: int | None, grade: int | None = None, needs: Needs | None = None) -> None:
        self.name, self.token, self.told = name, token, grade
        self.needs = needs or Needs()
        self.budgets: list[Budget] = []

    def grade(self, request: Request) -> int | None:
        return self.told

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        self.budgets += [ask.budget for ask in asks]
        return [DraftTree() if self.token is None else DraftTree.chain([self.token]) for _ in asks]


def request() -> Request:
    return Request(0, (1,), SamplingParams(), 0)


def cycle(cascade: Cascade, asked: Request, said: int, budget: Budget = Budget(1, 1, 1)) -> DraftTree:  # noqa: B008
    (tree,) = cascade.propose([Ask(asked, None, budget)])  # type: ignore[arg-type]
    asked.output += [said]
    cascade.observe(None, None, [Commit(asked, 1, 0, ())])  # type: ignore[arg-type]
    return tree


@pytest.mark.parametrize(("token", "grade", "expected"), [(7, 16, 7), (None, None, 8), (7, None, 7), (None, 16, None)])
def test_the_dear_one_is_asked_where_the_cheap_one_could_not_tell_and_has_nothing(token, grade, expected) -> None:
    cascade = Cascade(Fixed("a", token, grade), Fixed("b", 8))
    (tree,) = cascade.propose([Ask(request(), None, Budget(1, 1, 1, grade=grade))])  # type: ignore[arg-type]
    assert tree.tokens == (() if expected is None else (expected,))


def test_who_guesses_is_the_budgets_choice() -> None:
    cascade, asked = Cascade(Fixed("a", 7, 16), Fixed("b", 8, 3)), request()
    assert graded(cascade, asked) == (16, 3)
    assert cycle(cascade, asked, 7, Budget(1, 1, 1, member=0, grade=16)).tokens == (7,)
    assert cycle(cascade, asked, 7, Budget(1, 1, 1, member=1, grade=3)).tokens == (8,)


def test_answers_keep_the_order_of_their_asks() -> None:
    cascade = Cascade(Fixed("a", 7, 16), Fixed("b", 8))
    asks = [Ask(request(), None, Budget(1, 1, 1, member=member)) for member in (1, 0, 1, 0)]  # type: ignore[arg-type]
    assert [tree.tokens for tree in cascade.propose(asks)] == [(8,), (7,), (8,), (7,)]


def test_two_stacks_are_refused() -> None:
    stack = Needs(stack=(PageSpec(1, 1, 1),))
    with pytest.raises(ConfigError, match=r"'a\+b' joins two that each keep a key-value stack.*ngram"):
        Cascade(Fixed("a", 7, needs=stack), Fixed("b", 8, needs=stack))


@pytest.mark.parametrize(
    ("name", "problem"),
    [("ngram+nonsense", "unknown drafter 'nonsense'"), ("ngram+suffix+ngram", "joins two"), ("ngram+", "unknown")],
)
def test_names_that_are_no_cascade(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EngineConfig(model="m", drafter=name)


@pytest.mark.parametrize("first_has_it", [True, False])
def test_scratch_and_stack_serve_whoever_needs_them(first_has_it: bool) -> None:
    chain = Needs(scratch_levels=0, scratch_chain=True, stack=(PageSpec(1, 1, 1),), taps=(1, 3), extra_rows=4)
    tree = Needs(scratch_levels=1, taps=(2, 3), target_layers=2)
    pair = (chain, tree) if first_has_it else (tree, chain)
    both = Cascade(*(Fixed(n, 7, needs=needs) for n, needs in zip("ab", pair, strict=True)))
    for depth in range(1, 6):
        for width in (1, 3):
            most = max(chain.num_scratch(depth, width), tree.num_scratch(depth, width))
            assert both.needs.num_scratch(depth, width) >= most
    assert both.needs.stack == chain.stack
    assert (both.needs.taps, both.needs.extra_rows, both.needs.target_layers) == ((1, 2, 3), 4, 2)
    assert Cascade(Fixed("a", 7), Fixed("b", 8)).needs.num_scratch(5, 3) == 0


def test_both_guess_in_one_run() -> None:
    engine = toy.make_engine("ngram+early_exit", depth=3)
    cascade = engine.drafter
    counts = {"first": 0, "second": 0}
    for which in counts:
        drafter = getattr(cascade, which)

        def counted(asks, which=which, propose=drafter.propose):
            counts[which] += len(asks)
            return propose(asks)

        drafter.propose = counted
    requests = [toy.make_request(i, [1, 2, 3, 1, 2], SamplingParams(max_tokens=60)) for i in range(3)]
    toy.run(engine, requests)
    assert min(counts.values()) > 0
    cycles = sum(request.tally.cycles for request in requests)
    assert sum(counts.values()) <= cycles + 5
