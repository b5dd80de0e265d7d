"""Grows trees with any model that gives logits over its own pages: catches up, then runs a level of guesses a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.drafters.base import Ask, Commit
from outrider.drafters.candidates import Candidates
from outrider.drafters.device import DeviceTrees, read_before, unread
from outrider.drafters.trees import Level, Trees
from outrider.kernels.base import Kernels
from outrider.models.batch import BatchBuilder, FlatBatch, LevelBatches
from outrider.models.seats import Crew, DeviceTree, Outline
from outrider.request import Request
from outrider.tree import DraftTree

MAX_ROWS = 512
"""Rows of one pass of a stack that catches up with a long prompt."""


class Scratch:
    """Hands out the scratch slots of some asks while their trees grow: one a node that is run."""

    def __init__(self, asks: Sequence[Ask], batches: LevelBatches) -> None:
        self._batches = batches
        self._tables = [ask.table for ask in asks]
        self._numbers = {id(ask): number for number, ask in enumerate(asks)}
        self._used = [0] * len(asks)
        self._paths: list[tuple[int, ...]] = [()] * len(asks)

    def batch(self, level: Level, device: torch.device) -> FlatBatch:
        """A pass over the level's nodes, in their order; each sees its request's known tokens and its own path.

        It holds until the next level's is asked for.
        """
        numbers = [self._numbers[id(ask)] for ask in level.asks]
        known = [ask.request.num_tokens for ask in level.asks]
        paths = []
        for ask, number, origin in zip(level.asks, numbers, level.origins, strict=True):
            paths.append((*self._paths[origin], ask.scratch[self._used[number]]))
            self._used[number] += 1
        self._paths = paths
        return self._batches.batch(self._tables, numbers, level.tokens, known, paths, device)


class Grower:
    """Grows trees for a model that `run`s flat batches over its own pages.

    Args:
        run: a pass -> logits (M, V_d) float32. acceptance: "match" or "rejection".
        kept: (V_d,) target ids of the columns of the logits, ascending; None: column c is token c.
    """

    def __init__(
        self,
        run: Callable[[FlatBatch], Tensor],
        kernels: Kernels,
        acceptance: str,
        block_size: int,
        vocab_size: int,
        kept: Tensor | None = None,
    ) -> None:
        self._run = run
        self._block_size = block_size
        self._batches = LevelBatches(block_size)
        self.trees = Trees(Candidates(kernels, vocab_size, kept), acceptance)
        self._on_device = DeviceTrees(kernels, vocab_size, kept)

    def grow(self, asks: Sequence[Ask], starts: Sequence[int], device: torch.device) -> list[DraftTree]:
        """One tree an ask. `starts`: the first known token of each request that this stack has no keys for."""
        scratch = Scratch(asks, self._batches)
        logits = self._catch_up(asks, starts, device)
        return self.trees.grow(asks, logits, lambda level: (self._run(scratch.batch(level, device)), None))

    def read(self, asks: Sequence[Ask], device: torch.device) -> None:
        """Run all known tokens that the stack has not seen, but the last of each."""
        for batch in read_before(asks, [ask.seen for ask in asks], self._block_size, device):
            self._run(batch)

    def draft(self, crew: Crew, outline: Outline, known: FlatBatch | None = None) -> DeviceTree:
        """The crew's trees. known: the pass over what they said last (None: what their last cycle brought)."""
        logits = self._run(unread(crew, outline) if known is None else known)
        return self._on_device.grow(crew, outline, logits, lambda level: (self._run(level.batch()), None))

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn from what became of the last trees."""
        self.trees.observe(commits)

    def end(self, request: Request) -> None:
        self.trees.end(request)

    def _catch_up(self, asks: Sequence[Ask], starts: Sequence[int], device: torch.device) -> Tensor:
        """Run all known tokens that the stack has not seen; logits (A, V_d) after the last of each."""
        logits = []
        builder = BatchBuilder(self._block_size)
        for ask, start in zip(asks, starts, strict=True):
            stop = ask.request.num_tokens
            while start < stop:
                size = min(stop - start, MAX_ROWS - builder.num_rows)
                builder.request(ask.table)
                builder.line(start, ask.request.tokens(start, start + size), int(start + size == stop))
                start += size
                if builder.num_rows == MAX_ROWS:
                    logits.append(self._run(builder.build(device)))
                    builder = BatchBuilder(self._block_size)
        if builder.num_rows:
            logits.append(self._run(builder.build(device)))
        return torch.cat(logits) if len(logits) > 1 else logits[0]
