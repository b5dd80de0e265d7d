"""Two drafters, the cheap one first: the dear one guesses where the cheap one is silent or worth less, its price paid.

Source: the horizontal cascade of Chen et al., "Cascade Speculative Drafting" (2312.11462), with one drafter a cycle.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Commit, Drafter, Needs, Workshop, made, one_each
from outrider.errors import ConfigError
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.registry import DRAFTERS, READ_BY
from outrider.request import Request
from outrider.tree import ROOT, Budget, DraftTree

GRADES = (1, 2, 3, 4, 6, 9, 16)
"""Grades that are counted apart begin here."""
MEMORY = 200.0
"""Trials after which old evidence is halved."""
PRIOR_TRIALS = 6.0
PRIOR_CHEAP = (0.45, 0.6, 0.7, 0.75, 0.8, 0.85, 0.95)
PRIOR_DEAR = 0.7
"""Rates before anything is known: of the cheap one by grade (matches of a lookup), of the dear one."""
FADE = 0.98
"""What is left of the cheap one's evidence each time it is passed over, so that it is tried again now and then."""


def build(name: str, workshop: Workshop) -> Drafter:
    """The drafter of a name of the registry, or the cascade of two names joined by "+".

    Raises:
        ConfigError: for an unknown name, or two that cannot be joined. DrafterError: for one that is not finished.
    """
    first, joined, second = name.partition("+")
    if not joined:
        return made(DRAFTERS[name], workshop)
    config = workshop.config
    if {first, second} <= set(READ_BY["drafter_model"]):  # one folder cannot be both drafters' weights
        config = replace(config, drafter=second, drafter_model=None)
    return Cascade(made(DRAFTERS[first], Workshop(workshop.target, config)), made(DRAFTERS[second], workshop))


class Rate:
    """A running rate: the chance that a level of a tree holds the target's token, given that the level above did."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._hits = 0.0
        self._trials = 0.0

    @property
    def value(self) -> float:
        return (self._hits + PRIOR_TRIALS * self._prior) / (self._trials + PRIOR_TRIALS)

    def learn(self, depth: int, accepted: int) -> None:
        """A tree of `depth` levels had `accepted` of them accepted: so many hits, and a miss unless all were."""
        if self._trials > MEMORY:
            self.fade(0.5)
        self._hits += accepted
        self._trials += min(depth, accepted + 1)

    def fade(self, share: float) -> None:
        self._hits *= share
        self._trials *= share


def worth(rate: float, price: float) -> float:
    """Tokens that a chain brings beyond its price: each level holds with chance `rate` and costs `price` tokens, and
    none is taken that costs more than it brings. Infinite where levels cost nothing and always hold.
    """
    if price <= 0:
        return rate / (1 - rate) if rate < 1 else math.inf
    if not 0 < rate < 1:
        return 0.0 if rate <= price else math.inf
    levels = max(0, math.floor(math.log(price) / math.log(rate)))
    return rate * (1 - rate**levels) / (1 - rate) - levels * price


@dataclass(frozen=True, slots=True)
class _Guess:
    """A request's last tree, the rate that learns of it, and the output position of its first level."""

    tree: DraftTree
    rate: Rate
    position: int


class Cascade(Drafter):
    """Any two drafters by name, `ngram+eagle3`; both see every pass.

    The cheap one guesses where its guesses, at the grade it gives, are worth at least as much as the dear one's: tokens
    by measured acceptance, running means over all requests of the engine, learned from their own guesses; less what
    their rows and the dear one's levels last cost, as budgets told. Without prices, acceptance alone decides. Where the
    cheap one gives no grade it is asked first, and the dear one wherever it stays silent.

    Raises:
        ConfigError: where both keep keys and values of their own: there is one such stack.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.name = f"{first.name}+{second.name}"
        if first.needs.stack and second.needs.stack:
            raise ConfigError(
                f"drafter={self.name!r} joins two that each keep a key-value stack of their own, and there is room for "
                "one: let the first be one that looks up, such as ngram"
            )
        self.first, self.second = first, second
        self.needs = _both(first.needs, second.needs)
        self.nbytes = first.nbytes + second.nbytes
        self.notes = (*first.notes, *second.notes)
        self._cheap = [Rate(prior) for prior in PRIOR_CHEAP]
        self._dear = Rate(PRIOR_DEAR)
        self._row = self._level = 0.0
        """Tokens that a row of a pass, and a level of the dear one's drafting, were worth when it was last asked."""
        self._last: dict[int, _Guess] = {}

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        for drafter in (self.first, self.second):
            drafter.place(target_pages, own_pages if drafter.needs.stack else None, block_size)

    def begin(self, request: Request) -> None:
        self._last.pop(request.id, None)
        self.first.begin(request)
        self.second.begin(request)

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        for commit in commits:
            guess = self._last.pop(commit.request.id, None)
            said = commit.request.output
            if guess is not None and guess.position == len(said) - commit.num_new:
                depth, accepted = _outcome(guess.tree, said[guess.position :])
                guess.rate.learn(depth, accepted)
        for drafter in (self.first, self.second):
            drafter.observe(batch, output, commits)

    def grade(self, request: Request) -> int | None:
        """The first one's, where that one will be asked; else the second one's."""
        grade = self.first.grade(request)
        return grade if grade and self._leads(grade) else self.second.grade(request)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees: list[DraftTree | None] = [None] * len(asks)
        grades = [self.first.grade(ask.request) for ask in asks]
        leading = [index for index, grade in enumerate(grades) if grade is None or self._leads(grade)]
        for index, tree in zip(leading, self._guesses(self.first, [asks[i] for i in leading]), strict=True):
            if len(tree) or grades[index] is not None:
                trees[index] = tree
                self._remember(asks[index], tree, self._rate(grades[index]))
        for index, grade in enumerate(grades):
            if grade and index not in leading:
                self._rate(grade).fade(FADE)
        left = [index for index, tree in enumerate(trees) if tree is None]
        for budget in (asks[index].budget for index in left):
            self._row, self._level = budget.price(0), budget.level_price
        for index, tree in zip(left, self._guesses(self.second, [asks[i] for i in left]), strict=True):
            trees[index] = tree
            self._remember(asks[index], tree, self._dear)
        return [tree for tree in trees if tree is not None]

    def probe(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """Of the one that probes; where both do, of the first."""
        return (self.first if self.first.needs.extra_rows else self.second).probe(asks)

    def seen(self, request: Request) -> int | None:
        return (self.first if self.first.needs.stack else self.second).seen(request)

    def end(self, request: Request) -> None:
        self._last.pop(request.id, None)
        self.first.end(request)
        self.second.end(request)

    def _leads(self, grade: int) -> bool:
        """Whether the cheap one guesses at this grade."""
        if grade == 0:
            return False
        cheap, dear = self._rate(grade).value, self._dear.value
        return cheap >= dear or worth(cheap, self._row) >= worth(dear, self._row + self._level)

    def _rate(self, grade: int | None) -> Rate:
        """The cheap one's; without a grade, as of the best grade: it is only told apart from silence."""
        return self._cheap[-1 if grade is None else bisect_right(GRADES, grade) - 1]

    def _remember(self, ask: Ask, tree: DraftTree, rate: Rate) -> None:
        if len(tree):
            self._last[ask.request.id] = _Guess(tree, rate, len(ask.request.output))

    @staticmethod
    def _guesses(drafter: Drafter, asks: Sequence[Ask]) -> list[DraftTree]:
        if not asks:
            return []
        if not drafter.needs.ranks:
            asks = [replace(ask, budget=_narrowed(ask.budget, drafter.needs.width)) for ask in asks]
        return one_each(drafter.name, asks, drafter.propose(asks))


def _narrowed(budget: Budget, width: int) -> Budget:
    """For a drafter that looks at no prices: where only these would narrow its tree, it keeps to its own width."""
    width = min(width, budget.width)
    return replace(budget, width=width, nodes=min(budget.nodes, width * budget.depth)) if budget.prices else budget


def _outcome(tree: DraftTree, said: Iterable[int]) -> tuple[int, int]:
    """How many levels the tree has, and how many of them held what was said."""
    child = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node: int | None = ROOT
    accepted = 0
    for token in said:
        node = child.get((node, token)) if node is not None else None
        accepted += node is not None
    return max(tree.depths()), accepted


def _both(first: Needs, second: Needs) -> Needs:
    """What serves either."""
    levels = [needs.scratch_levels for needs in (first, second) if needs.scratch_levels is not None]
    stack = first if first.stack else second
    return Needs(
        stack=stack.stack,
        stack_dtype=stack.stack_dtype,
        scratch_levels=min(levels, default=None),
        scratch_chain=all(n.scratch_chain for n in (first, second) if n.scratch_levels is not None),
        ranks=first.ranks or second.ranks,
        width=max(first.width, second.width),
        target_layers=max((n for n in (first.target_layers, second.target_layers) if n is not None), default=None),
        taps=tuple(sorted({*first.taps, *second.taps})),
        extra_rows=first.extra_rows or second.extra_rows,
    )
