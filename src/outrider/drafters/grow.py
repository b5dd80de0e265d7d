"""Grows trees with any model that gives logits over its own pages: catches up, then runs a level of guesses a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Line:
    """A request's text in the stack of whoever drafts.

    Attributes:
        table: block table. start: how many leading tokens have keys there. known: tokens in all, ids of the stack's own
            model. tokens: those from `start` on. scratch: slots for guesses.
    """

    table: Sequence[int]
    start: int
    known: int
    tokens: Sequence[int]
    scratch: Sequence[int]

    @staticmethod
    def of(ask: Ask, start: int) -> Line:
        """The request's own tokens, from the first one on that the stack has no keys for."""
        known = ask.request.num_tokens
        return Line(ask.table, start, known, ask.request.tokens(start, known), ask.scratch)


class Scratch:
    """Hands out the scratch slots of some asks while their trees grow: one a node that is run.

    Args:
        spelled: the id that stands for a guessed token in the stack's own vocabulary; None: the token itself.
    """

    def __init__(
        self,
        asks: Sequence[Ask],
        lines: Sequence[Line],
        batches: LevelBatches,
        spelled: Mapping[int, int] | None = None,
    ) -> None:
        self._batches = batches
        self._lines = lines
        self._spelled = spelled
        self._tables = [line.table for line in lines]
        self._numbers = {id(ask): number for number, ask in enumerate(asks)}
        self._used = [0] * len(asks)
        self._paths: list[tuple[int, ...]] = [()] * len(asks)

    def batch(self, level: Level, device: torch.device) -> FlatBatch:
        """A pass over the level's nodes, in their order; each sees its request's known tokens and its own path.

        It holds until the next level's is asked for.
        """
        numbers = [self._numbers[id(ask)] for ask in level.asks]
        known = [self._lines[number].known for number in numbers]
        paths = []
        for number, origin in zip(numbers, level.origins, strict=True):
            paths.append((*self._paths[origin], self._lines[number].scratch[self._used[number]]))
            self._used[number] += 1
        self._paths = paths
        tokens = level.tokens if self._spelled is None else [self._spelled[token] for token in level.tokens]
        return self._batches.batch(self._tables, numbers, tokens, known, paths, device)


class Grower:
    """Grows trees for a model that `run`s flat batches over its own pages.

    Args:
        run: a pass -> logits (M, V_d) float32. acceptance: "match" or "rejection".
        kept: (V_d,) target ids of the columns of the logits, ascending; None: column c is token c.
        spelled: the model's own id of each of them, where it is of another vocabulary.
    """

    def __init__(
        self,
        run: Callable[[FlatBatch], Tensor],
        kernels: Kernels,
        acceptance: str,
        block_size: int,
        vocab_size: int,
        kept: Tensor | None = None,
        spelled: Mapping[int, int] | None = None,
    ) -> None:
        self._run = run
        self._spelled = spelled
        self._block_size = block_size
        self._batches = LevelBatches(block_size)
        self.trees = Trees(Candidates(kernels, vocab_size, kept), acceptance)
        self._on_device = DeviceTrees(kernels, vocab_size, kept)

    def grow(self, asks: Sequence[Ask], lines: Sequence[Line], device: torch.device) -> list[DraftTree]:
        """One tree an ask. lines: where the text of each is."""
        scratch = Scratch(asks, lines, self._batches, self._spelled)
        logits = self._catch_up(lines, device)
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

    def _catch_up(self, lines: Sequence[Line], device: torch.device) -> Tensor:
        """Run all known tokens that the stack has not seen; logits (A, V_d) after the last of each."""
        logits = []
        builder = BatchBuilder(self._block_size)
        for line in lines:
            start = line.start
            while start < line.known:
                size = min(line.known - start, MAX_ROWS - builder.num_rows)
                first = start - line.start
                builder.request(line.table)
                builder.line(start, line.tokens[first : first + size], int(start + size == line.known))
                start += size
                if builder.num_rows == MAX_ROWS:
                    logits.append(self._run(builder.build(device)))
                    builder = BatchBuilder(self._block_size)
        if builder.num_rows:
            logits.append(self._run(builder.build(device)))
        return torch.cat(logits) if len(logits) > 1 else logits[0]
