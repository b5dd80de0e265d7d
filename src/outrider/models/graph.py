"""CUDA graphs of padded passes: captured on first use, then replayed without their Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.kernels.base import KeyIndex
from outrider.kernels.graph_pool import GraphPool
from outrider.models.batch import FlatBatch

Output = tuple[Tensor, dict[int, Tensor]]
Run = Callable[[FlatBatch, Any], Output]

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Rows of the graphs of passes whose rows mind no neighbour. They choose which graph runs, never a row's arithmetic;
wider passes run without, as their arithmetic takes longer than their launches."""
LEAST_BLOCKS, LEAST_TAIL = 64, 16
"""Columns of the smallest key index that is captured; longer ones double, so that few graphs serve all lengths."""
OWN_BYTES = 8 << 20
"""Bytes that a graph's nodes are expected to take."""

_WHOLE: ContextVar[bool] = ContextVar("_WHOLE", default=False)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Captured:
    """One graph with the tensors that it reads and writes; `used` rows of the latter hold a pass, the others fill."""

    graph: Any
    output: Output
    batch: FlatBatch
    used: int = 0


@dataclass(slots=True)
class _Shelf:
    """The graphs of one owner, the one that was used longest ago first; and the passes that are too large for one."""

    captured: dict[Any, _Captured] = field(default_factory=dict)
    refused: set[Any] = field(default_factory=set)


class PassGraphs:
    """Runs passes by replaying them; a replay computes the same bits as the pass that was captured.

    A pass may have fewer rows than its graph: the graph's other rows write to slot 0 and see nothing else. Where a
    capture fails (an operation of the module waits for the device, say), passes run as they are from then on
    and `note` tells why. Where the pool has no room, graphs that were used longest ago give way.
    """

    def __init__(self, pool: GraphPool | None = None, pads: bool = False) -> None:
        """pool: shared with other passes over the same kernels (None: one of its own). pads: passes have as many rows
        without a graph as with one, so that ranks of which some took a graph and some did not still do the same.
        """
        self.pool = pool or GraphPool()
        self.pads = pads
        self.note: str | None = None
        self._gave_up = False
        self._shelves: WeakKeyDictionary[Any, _Shelf] = WeakKeyDictionary()

    def __call__(
        self,
        kind: Any,
        run: Run,
        batch: FlatBatch,
        owner: Any,
        num_rows: int | None = None,
        inputs: Sequence[Tensor] = (),
    ) -> Output:
        """What `run(batch, owner)` gives, in its first rows; the tensors hold until the next call.

        Args:
            kind: equal for passes that run the same operations on the same shapes of tokens, positions and slots.
            owner: whose tensors the passes read and write, such as a stack of pages; its graphs go with it.
            num_rows: of the graph, no fewer than the batch's (None: as many).
            inputs: what a run reads and writes over; the passes before a capture leave it as it was.
        """
        size = num_rows or batch.num_rows
        if self._gave_up or _WHOLE.get() or not self.pool.limit:
            return run(self._padded(batch, size), owner)
        shelf = self._shelves.setdefault(owner, _Shelf())
        blocks, tail = _capacity(batch.keys)
        key = (kind, size, batch.keys.block_size, blocks, tail)
        found = shelf.captured.pop(key, None)
        if found is None and key not in shelf.refused:
            static = _static(batch, size, blocks, tail)
            _fill(static, batch, size)
            kept = [values.clone() for values in inputs]
            try:
                found = self._take(run, static, owner, shelf)
            except torch.OutOfMemoryError:  # others took what was planned
                self.note = "some passes run without a CUDA graph, slower: the device has no memory left for one"
            except RuntimeError as error:  # whatever CUDA or a module's own operations refuse while a graph is taken
                reason = str(error).strip().splitlines() or [type(error).__name__]
                self.note, self._gave_up = f"passes run without a CUDA graph, slower: {reason[0]}", True
                self._shelves.clear()
            for values, copy in zip(inputs, kept, strict=True):
                values.copy_(copy)
        if found is None:
            shelf.refused.add(key)
            return run(self._padded(batch, size), owner)
        shelf.captured[key] = found  # behind those that were used before it
        _fill(found.batch, batch, found.used)
        found.used = batch.num_rows
        found.graph.replay()
        return found.output

    def _padded(self, batch: FlatBatch, size: int) -> FlatBatch:
        """The pass that runs without a graph."""
        if not self.pads or batch.num_rows == size:
            return batch
        static = _static(batch, size, batch.keys.tables.shape[1], batch.keys.tails.shape[1])
        _fill(static, batch, 0)
        return static

    def _take(self, run: Run, static: FlatBatch, owner: Any, shelf: _Shelf) -> _Captured | None:
        """A graph of this pass; None where the pool has no room for it, even without this owner's other graphs."""
        pool, device = self.pool, static.tokens.device
        own = _nbytes(static)
        nbytes = self._warm_up(run, static, owner) + own + OWN_BYTES
        if not pool.make_room(device, nbytes, shelf.captured):
            self.note = (
                f"some passes run without a CUDA graph, slower: one of {static.num_rows} rows may take "
                f"{nbytes / 2**20:.0f} MiB and {pool.limit / 2**20:.0f} MiB are planned for all"
            )
            return None
        with pool.counted(device):
            found = self._capture(run, static, owner)
        pool.keep(found, own)
        return found

    def _warm_up(self, run: Run, static: FlatBatch, owner: Any) -> int:
        """Run a pass until nothing is set up any more -> bytes that it takes while it runs."""
        return self.pool.warm_up(static.tokens.device, partial(run, static, owner))

    def _capture(self, run: Run, static: FlatBatch, owner: Any) -> _Captured:
        graph, output = self.pool.capture(static.tokens.device, partial(run, static, owner))
        return _Captured(graph, output, static)


@contextmanager
def as_they_are() -> Iterator[None]:
    """Within the block passes run without graphs of their own: they are captured as parts of a whole."""
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def bucket(num_rows: int) -> int | None:
    """The fewest rows of a graph that holds so many, None where no graph does."""
    return next((rows for rows in BUCKETS if num_rows <= rows), None)


def _capacity(keys: KeyIndex) -> tuple[int, int]:
    """Columns of tables and tails that hold those of `keys`."""
    return max(LEAST_BLOCKS, _power(keys.tables.shape[1])), max(LEAST_TAIL, _power(keys.tails.shape[1]))


def _power(number: int) -> int:
    """The least power of two that is not below it."""
    return 1 << (number - 1).bit_length()


def _static(batch: FlatBatch, num_rows: int, blocks: int, tail: int) -> FlatBatch:
    """Tensors of their own for every pass of at most this shape."""
    keys = batch.keys
    index = replace(
        keys,
        tables=keys.tables.new_zeros(num_rows, blocks),
        request=keys.request.new_zeros(num_rows),
        linear=keys.linear.new_zeros(num_rows),
        tails=keys.tails.new_zeros(num_rows, tail),
        length=keys.length.new_ones(num_rows),
    )
    tokens, positions, slots = (values.new_zeros(num_rows) for values in (batch.tokens, batch.positions, batch.slots))
    return FlatBatch(tokens, positions, slots, index, batch.logit_rows)


def _nbytes(batch: FlatBatch) -> int:
    keys = batch.keys
    index = keys.tables, keys.request, keys.linear, keys.tails, keys.length
    return sum(values.nbytes for values in (batch.tokens, batch.positions, batch.slots, *index))


def _fill(static: FlatBatch, batch: FlatBatch, used: int) -> None:
    """Copy a pass into the tensors of its graph; columns beyond its own keep old numbers, which no row reads.

    Rows up to `used` that it does not need become filling rows again: one key, their own, in slot 0.
    """
    count, keys, own = batch.num_rows, batch.keys, static.keys
    static.tokens[:count] = batch.tokens
    static.positions[:count] = batch.positions
    static.slots[:count] = batch.slots
    tables, request = keys.tables, keys.request
    if tables.shape[0] > own.tables.shape[0]:  # of a batch that is run in several passes: each row brings its own
        tables, request = tables.index_select(0, request), torch.arange(count, dtype=torch.int32, device=request.device)
    own.tables[: tables.shape[0], : tables.shape[1]] = tables
    own.request[:count] = request
    own.linear[:count] = keys.linear
    own.tails[:count, : keys.tails.shape[1]] = keys.tails
    own.length[:count] = keys.length
    if used > count:
        for values in (static.tokens, static.positions, static.slots, own.request, own.linear, own.tails):
            values[count:used] = 0
        own.length[count:used] = 1
