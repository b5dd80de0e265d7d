"""Two drafters, the cheap one first: the dear one guesses where the cheap one is silent or has been worse.

Source: the horizontal cascade of Chen et al., "Cascade Speculative Drafting" (2312.11462), with one drafter a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Commit, Drafter, Needs, Workshop, made, one_each
from outrider.errors import ConfigError
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.registry import DRAFTERS, READ_BY
from outrider.request import Request
from outrider.tree import EMPTY_TREE, DraftTree


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


class Cascade(Drafter):
    """Any two drafters by name, `ngram+eagle3`; both see every pass.

    Which of them guesses is control's choice, by what they bring and cost (`Budget.member`). A cheap one that gives no
    grade is asked first where it was chosen, and the dear one wherever it stays silent.

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

    @property
    def members(self) -> tuple[Drafter, ...]:
        return (self.first, self.second)

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        for drafter in (self.first, self.second):
            drafter.place(target_pages, own_pages if drafter.needs.stack else None, block_size)

    def begin(self, request: Request) -> None:
        self.first.begin(request)
        self.second.begin(request)

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        for drafter in (self.first, self.second):
            drafter.observe(batch, output, commits)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = [EMPTY_TREE] * len(asks)
        chosen = [index for index, ask in enumerate(asks) if ask.budget.member == 0]
        for index, tree in zip(chosen, self._guesses(self.first, [asks[i] for i in chosen]), strict=True):
            trees[index] = tree
        silent = {index for index in chosen if not len(trees[index]) and asks[index].budget.grade is None}
        left = [index for index, ask in enumerate(asks) if ask.budget.member or index in silent]
        for index, tree in zip(left, self._guesses(self.second, [asks[i] for i in left]), strict=True):
            trees[index] = tree
        return trees

    def probe(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """Of the one that probes; where both do, of the first."""
        return (self.first if self.first.needs.extra_rows else self.second).probe(asks)

    def seen(self, request: Request) -> int | None:
        return (self.first if self.first.needs.stack else self.second).seen(request)

    def end(self, request: Request) -> None:
        self.first.end(request)
        self.second.end(request)

    @staticmethod
    def _guesses(drafter: Drafter, asks: Sequence[Ask]) -> list[DraftTree]:
        if not asks:
            return []
        return one_each(drafter.name, asks, drafter.propose(asks))


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
