"""Two drafters, one after the other: the cheap one is asked first, the dear one only where it was silent.

Source: the horizontal cascade of Chen et al., "Cascade Speculative Drafting" (2312.11462), with one drafter a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Commit, Drafter
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.request import Request
from outrider.tree import DraftTree


class Cascade(Drafter):
    """Any two drafters by name, `ngram+eagle3`; both see every pass."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first, self.second = first, second
        self.name = f"{first.name}+{second.name}"
        self.needs = replace(second.needs, taps=tuple(sorted({*first.needs.taps, *second.needs.taps})))
        self.nbytes = first.nbytes + second.nbytes

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        self.first.place(target_pages, None, block_size)
        self.second.place(target_pages, own_pages, block_size)

    def begin(self, request: Request) -> None:
        self.first.begin(request)
        self.second.begin(request)

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        self.first.observe(batch, output, commits)
        self.second.observe(batch, output, commits)

    def grade(self, request: Request) -> int | None:
        """The first one's; where it is silent, the second one's."""
        return self.first.grade(request) or self.second.grade(request)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = self.first.propose(asks)
        silent = [index for index, tree in enumerate(trees) if not len(tree)]
        if silent:
            for index, tree in zip(silent, self.second.propose([asks[index] for index in silent]), strict=True):
                trees[index] = tree
        return trees

    def seen(self, request: Request) -> int | None:
        return self.second.seen(request)

    def end(self, request: Request) -> None:
        self.first.end(request)
        self.second.end(request)
