"""Cascades: who is asked, what each is learned to be worth, and which two cannot be joined."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cache.pages import PageSpec
from outrider.config import EngineConfig
from outrider.drafters.base import Ask, Commit, Drafter, Needs
from outrider.drafters.cascade import Cascade, worth
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


@pytest.mark.parametrize(
    ("token", "grade", "expected"), [(7, 16, 7), (7, 0, 8), (None, None, 8), (7, None, 7), (None, 16, None)]
)
def test_the_dear_one_is_asked_where_the_cheap_one_has_nothing(token, grade, expected) -> None:
    cascade = Cascade(Fixed("a", token, grade), Fixed("b", 8))
    (tree,) = cascade.propose([Ask(request(), None, Budget(1, 1, 1))])  # type: ignore[arg-type]
    assert tree.tokens == (() if expected is None else (expected,))


def test_the_grade_is_that_of_the_one_that_will_be_asked() -> None:
    assert Cascade(Fixed("a", 7, 16), Fixed("b", 8, 3)).grade(request()) == 16
    assert Cascade(Fixed("a", 7, 0), Fixed("b", 8, 3)).grade(request()) == 3
    assert Cascade(Fixed("a", 7, 1), Fixed("b", 8)).grade(request()) is None


def test_a_cheap_one_that_fails_is_passed_over_and_tried_again_later() -> None:
    """At its grade only; and once it is right again it gets its place back."""
    cheap, dear = Fixed("a", 7, 9), Fixed("b", 8)
    cascade, asked = Cascade(cheap, dear), request()
    for step in range(60):
        cycle(cascade, asked, said=8 if step % 4 else 9)  # the dear one is right three times out of four
    assert cascade.grade(asked) is None
    cheap.told = 16
    assert cascade.grade(asked) == 16
    cheap.told = 9
    before = len(cheap.budgets)
    for step in range(400):
        cycle(cascade, asked, said=8 if step % 4 else 9)
    assert 0 < len(cheap.budgets) - before < 40
    for _ in range(200):
        cycle(cascade, asked, said=7)
    assert cascade.grade(asked) == 9


def test_the_dear_one_gives_way_where_it_is_worse() -> None:
    cheap, dear = Fixed("a", 7, 2), Fixed("b", 8)
    cascade, asked = Cascade(cheap, dear), request()
    assert cycle(cascade, asked, said=9).tokens == (8,)
    for _ in range(50):
        cycle(cascade, asked, said=7)
    assert cycle(cascade, asked, said=7).tokens == (7,)


@pytest.mark.parametrize(("level_price", "leads"), [(0.0, False), (0.3, True)])
def test_a_cheap_one_that_is_worse_leads_where_the_dear_ones_levels_cost_more(level_price: float, leads: bool) -> None:
    """The dear one is right three times of four, the cheap one every other time: tokens less their price decide."""
    cheap, dear = Fixed("a", 7, 0), Fixed("b", 8)
    cascade, asked = Cascade(cheap, dear), request()
    priced = Budget(8, 1, 8, prices=(0.05,), level_price=level_price)
    for step in range(200):
        cheap.told = 0 if step % 3 else 9
        cheap.token = 7 if step % 2 else 6
        cycle(cascade, asked, said=(8 if step % 4 else 9) if cheap.told == 0 else 7, budget=priced)
    cheap.told = 9
    assert (cascade.grade(asked) == 9) is leads


@given(rate=st.floats(0.01, 0.99), price=st.floats(0.001, 1.5))
def test_worth_is_the_best_of_all_numbers_of_levels(rate: float, price: float) -> None:
    best = max(itertools.accumulate((rate**level - price for level in range(1, 2000)), initial=0.0))
    assert worth(rate, price) == pytest.approx(best, abs=1e-6)


def test_a_drafter_without_prices_keeps_to_its_own_width() -> None:
    ranking = Needs(ranks=True, width=4)
    cheap, dear = Fixed("a", 7, 16), Fixed("b", 8, needs=ranking)
    cascade = Cascade(cheap, dear)
    assert (cascade.needs.width, cascade.needs.ranks) == (4, True)
    priced = Budget(5, 4, 20, prices=(0.1,))
    cycle(cascade, request(), 7, priced)
    cycle(cascade, request(), 7, Budget(5, 4, 20))
    assert [(budget.width, budget.nodes) for budget in cheap.budgets] == [(1, 5), (4, 20)]
    cheap.told = 0
    cycle(cascade, request(), 8, priced)
    assert dear.budgets == [priced]


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
