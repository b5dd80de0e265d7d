"""What drafters fed from the target's hidden states share: the taps that wait, and the layers that catch up with them.

The entry at position j of such a stack belongs to token x_j and uses the taps of position j - 1, so that n known tokens
have n entries, and each depends on the token prefix [0, j] alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Commit, Drafter, Workshop
from outrider.drafters.candidates import Candidates
from outrider.drafters.trees import Trees
from outrider.models.batch import BatchBuilder, FlatBatch, TargetOutput
from outrider.request import Request

IN_USE = 16
"""At most so many entries wait where a request ends and its drafter was in use."""
MOST_PENDING = 4 * 2**20
"""Bytes of taps of one request that may wait for a proposal; entries beyond are written at once."""
MAX_ROWS = 512
"""Rows of one pass that catches up."""


@dataclass(slots=True)
class _Pending:
    """One request's entries [0, done) are written; `taps` holds those of the following ones, row by row."""

    done: int
    taps: list[Tensor] = field(default_factory=list)
    num_rows: int = 0

    def add(self, taps: Tensor) -> None:
        self.taps.append(taps)
        self.num_rows += taps.shape[0]

    def take(self, count: int) -> Tensor:
        """The taps of the next `count` entries, which are done then: (count, W)."""
        taps = self.taps[0] if len(self.taps) == 1 else torch.cat(self.taps)
        # Few rows are left; a view of them would keep a whole pass alive.
        self.taps, self.num_rows = [taps[count:].clone()], self.num_rows - count
        self.done += count
        return taps[:count]


class Feed:
    """Keeps the taps of committed rows until their entries are written.

    Where a request begins behind a cached prefix whose taps nobody saw, zeros stand for them: its entries come from the
    tokens alone.

    Args:
        layers: target layers that are tapped. width: of their outputs side by side.
    """

    def __init__(self, layers: Sequence[int], width: int, device: torch.device, block_size: int) -> None:
        self._layers = layers
        self._most = max(IN_USE, min(MAX_ROWS, MOST_PENDING // (4 * width)))
        self._unknown = torch.zeros(1, width, device=device)
        self._device = device
        self._block_size = block_size
        self._pending: dict[int, _Pending] = {}

    def begin(self, request: Request) -> None:
        self._pending.pop(request.id, None)

    def observe(self, output: TargetOutput, commits: Sequence[Commit]) -> None:
        """Take in the taps of what was committed."""
        taps = torch.cat([output.taps[layer] for layer in self._layers], dim=1)
        for commit in commits:
            pending = self._pending.get(commit.request.id)
            if pending is None:
                pending = self._pending[commit.request.id] = _Pending(commit.seen)
                pending.add(self._unknown.expand(commit.start + 1 - commit.seen, -1))
            assert pending.done + pending.num_rows == commit.start + 1
            pending.add(_rows(taps, commit.rows))

    def overdue(self, commits: Sequence[Commit]) -> list[tuple[FlatBatch, Tensor]]:
        """Passes that write what has waited too long, or has no proposal to wait for: (batch, taps (T, W)).

        The last committed token's taps stay: the entry that they belong to is not known to be kept yet. Where a request
        ends whose drafter was not asked for long, since its guesses do not pay, they are not paid for either.
        """
        batcher = _Batcher(self._block_size, self._device)
        for commit in commits:
            pending = self._pending[commit.request.id]
            ready = pending.num_rows - 1
            kept = ready <= IN_USE or not commit.request.params.speculation  # for prompts that go on from here
            if ready >= self._most or (ready and kept and commit.request.finish_reason is not None):
                batcher.add(commit.request, commit.table, pending, ready, num_logits=0)
        return batcher.finish()

    def due(self, asks: Sequence[Ask]) -> list[tuple[FlatBatch, Tensor]]:
        """Passes that write every entry up to each ask's last known token, whose row asks for logits."""
        batcher = _Batcher(self._block_size, self._device)
        for ask in asks:
            pending = self._pending[ask.request.id]
            batcher.add(ask.request, ask.table, pending, pending.num_rows, num_logits=1)
        return batcher.finish()

    def done(self, request: Request) -> int | None:
        """How many entries are written."""
        pending = self._pending.get(request.id)
        return None if pending is None else pending.done


class _Batcher:
    """Collects entries of many requests into passes of at most `MAX_ROWS` rows."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._builder = BatchBuilder(block_size)
        self._taps: list[Tensor] = []
        self._passes: list[tuple[FlatBatch, Tensor]] = []

    def add(self, request: Request, table: Sequence[int], pending: _Pending, count: int, num_logits: int) -> None:
        while count:
            size = min(count, MAX_ROWS - self._builder.num_rows)
            start = pending.done
            self._builder.request(table)
            self._builder.line(start, request.tokens(start, start + size), num_logits if size == count else 0)
            self._taps.append(pending.take(size))
            count -= size
            if self._builder.num_rows == MAX_ROWS:
                self._cut()

    def finish(self) -> list[tuple[FlatBatch, Tensor]]:
        if self._builder.num_rows:
            self._cut()
        return self._passes

    def _cut(self) -> None:
        self._passes.append((self._builder.build(self._device), torch.cat(self._taps)))
        self._builder, self._taps = BatchBuilder(self._block_size), []


class FedHead(Protocol):
    """A head with a stack of its own: the target layers that it taps, the ids that it knows."""

    taps: tuple[int, ...]
    kept_ids: Tensor

    def place(self, pages: Pages) -> None: ...


class TapFed(Drafter):
    """A drafter with a stack of its own that is written from taps; it says how, in `write`."""

    head: FedHead
    _workshop: Workshop

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        assert own_pages is not None
        target = self._workshop.target
        self.head.place(own_pages)
        self._block_size = block_size
        self._feed = Feed(self.head.taps, len(self.head.taps) * target.hidden_size, target.device, block_size)
        candidates = Candidates(target.kernels, target.vocab_size, self.head.kept_ids)
        self._trees = Trees(candidates, self._workshop.config.acceptance)

    def write(self, batch: FlatBatch, taps: Tensor) -> Tensor | None:
        """Write T entries, taps (T, W) -> states (M, H) of `batch.logit_rows`, where guesses start from them."""
        raise NotImplementedError

    def begin(self, request: Request) -> None:
        self._feed.begin(request)

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        self._feed.observe(output, commits)
        for entries, taps in self._feed.overdue(commits):
            self.write(entries, taps)
        self._trees.observe(commits)

    def seen(self, request: Request) -> int | None:
        return self._feed.done(request)

    def end(self, request: Request) -> None:
        self._feed.begin(request)


def _rows(taps: Tensor, rows: Sequence[int]) -> Tensor:
    """Chosen rows; a view where they lie side by side, as in every plain pass."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return taps[rows[0] : rows[-1] + 1]
    return taps[list(rows)]
