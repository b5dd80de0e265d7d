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
from outrider.drafters.device import DeviceTrees, unread
from outrider.drafters.trees import Trees
from outrider.kernels.tree import Walks
from outrider.models.batch import BatchBuilder, FlatBatch, TargetOutput
from outrider.models.seats import Crew, Outline, TreeRows
from outrider.models.target import Target
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

    def board(self, asks: Sequence[Ask]) -> tuple[list[tuple[FlatBatch, Tensor]], Tensor]:
        """Passes that write every entry but that of each ask's last known token, and the taps of those: (A, W)."""
        batcher = _Batcher(self._block_size, self._device)
        last = []
        for ask in asks:
            pending = self._pending[ask.request.id]
            batcher.add(ask.request, ask.table, pending, pending.num_rows - 1, num_logits=0)
            last.append(pending.take(1))
        return batcher.finish(), torch.cat(last)

    def resume(self, request: Request, taps: Tensor) -> None:
        """A request comes back from its seat: taps (X, W) of its last known tokens, whose entries are to be written."""
        pending = self._pending[request.id] = _Pending(request.num_tokens - taps.shape[0])
        pending.add(taps)

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


class HeldTaps:
    """The taps of what each seat's last cycle brought, token by token: those of the positions before.

    Args:
        layers: target layers that are tapped. most: tokens that a cycle brings.
    """

    def __init__(self, layers: Sequence[int], num_seats: int, most: int, target: Target) -> None:
        self._layers = layers
        width = len(layers) * target.hidden_size
        self._taps = torch.zeros(num_seats + 1, most, width, device=target.device)

    @staticmethod
    def bytes_of(layers: Sequence[int], most: int, target: Target) -> int:
        """What one seat will take."""
        return 4 * most * len(layers) * target.hidden_size

    def put(self, seats: Sequence[int], taps: Tensor) -> None:
        """taps: (A, W), of the one token that each seat has yet to read."""
        self._taps[torch.tensor(seats, device=taps.device), 0] = taps

    def of(self, seat: int, count: int) -> Tensor:
        """(count, W)."""
        return self._taps[seat, :count].clone()

    def unread(self, crew: Crew, count: int) -> Tensor:
        """(R * count, W): of the first `count` tokens of each."""
        return self._taps[:, :count].index_select(0, crew.index).flatten(0, 1)

    def follow(self, crew: Crew, rows: TreeRows, output: TargetOutput, walks: Walks) -> None:
        """Keep the taps of the root and of the accepted path; a crew that did not move keeps what it had."""
        path = torch.nn.functional.pad(walks.paths.to(torch.int64) + 1, (1, 0))  # the root is row 0, node i row i + 1
        wanted = (rows.trees.starts[:, None] + path.clamp(min=0)).flatten()
        taps = torch.cat([output.taps[layer].index_select(0, wanted) for layer in self._layers], dim=1)
        count = path.shape[1]
        moved = crew.alive & (walks.said[:, 0] >= 0)
        kept = self._taps[:, :count].index_select(0, crew.index)
        kept = torch.where(moved[:, None, None], taps.view_as(kept), kept)
        self._taps[:, :count].index_copy_(0, crew.index, kept)

    def keep(self, crew: Crew, rows: TreeRows, output: TargetOutput, walks: Walks) -> None:
        """Put the root's taps behind those that wait."""
        roots = rows.trees.starts.to(torch.int64)
        taps = torch.cat([output.taps[layer].index_select(0, roots) for layer in self._layers], dim=1)
        moved = crew.alive & (walks.said[:, 0] >= 0)
        place = (crew.accepted + 1).clamp(max=self._taps.shape[1] - 1)
        kept = self._taps[crew.index, place]
        self._taps[crew.index, place] = torch.where(moved[:, None], taps, kept)


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
        self._on_device = DeviceTrees(target.kernels, target.vocab_size, self.head.kept_ids)

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

    def seat(self, num_seats: int, levels: int) -> None:
        self._held = HeldTaps(self.head.taps, num_seats, levels + 1, self._workshop.target)

    def seat_bytes(self, levels: int) -> int:
        return HeldTaps.bytes_of(self.head.taps, levels + 1, self._workshop.target)

    def board(self, asks: Sequence[Ask], seats: Sequence[int]) -> None:
        passes, last = self._feed.board(asks)
        for entries, taps in passes:
            self.write(entries, taps)
        self._held.put(seats, last)

    def follow(self, crew: Crew, rows: TreeRows, output: TargetOutput, walks: Walks) -> None:
        self._held.follow(crew, rows, output, walks)

    def read(self, crew: Crew, outline: Outline) -> None:
        self.write(unread(crew, outline), self._held.unread(crew, outline.reach))

    def keep(self, crew: Crew, rows: TreeRows, output: TargetOutput, walks: Walks) -> None:
        self._held.keep(crew, rows, output, walks)

    def leave(self, request: Request, seat: int, unread: int) -> None:
        self._feed.resume(request, self._held.of(seat, unread))

    def end(self, request: Request) -> None:
        self._feed.begin(request)


def _rows(taps: Tensor, rows: Sequence[int]) -> Tensor:
    """Chosen rows; a view where they lie side by side, as in every plain pass."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return taps[rows[0] : rows[-1] + 1]
    return taps[list(rows)]
