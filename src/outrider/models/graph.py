"""CUDA graphs of a module's padded pass: captured on first use, then replayed without its Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.cache.pages import Pages
from outrider.kernels.base import KeyIndex
from outrider.models.batch import FlatBatch

Output = tuple[Tensor, dict[int, Tensor]]
Run = Callable[[FlatBatch, Pages], Output]

LEAST_BLOCKS, LEAST_TAIL = 64, 16
"""Columns of the smallest key index that is captured; longer ones double, so that few graphs serve all lengths."""
WARM_UPS = 2
"""Passes before a capture: kernels are compiled and libraries set up in the first ones, which a graph must not hold."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """One graph with the tensors that it reads and writes."""

    graph: Any
    batch: FlatBatch
    output: Output


@dataclass(slots=True)
class _Shelf:
    """The graphs over one stack of pages. They share a pool of memory, which must not outlive the last of them."""

    pool: Any = None
    captured: dict[Any, _Captured] = field(default_factory=dict)


class PassGraphs:
    """Runs passes of one width by replaying them; a replay computes the same bits as the pass that was captured.

    Where a capture fails (an operation of the module waits for the device, say), passes run as they are from then on
    and `note` tells why.
    """

    def __init__(self) -> None:
        self.note: str | None = None
        self._shelves: WeakKeyDictionary[Pages, _Shelf] = WeakKeyDictionary()

    def __call__(self, kind: Any, run: Run, batch: FlatBatch, pages: Pages) -> Output:
        """What `run(batch, pages)` gives; the tensors hold until the next call.

        Args:
            kind: equal for passes that run the same operations on the same shapes of tokens, positions and slots.
        """
        if self.note is not None:
            return run(batch, pages)
        shelf = self._shelves.setdefault(pages, _Shelf())
        blocks, tail = _capacity(batch.keys)
        key = (kind, batch.num_rows, batch.keys.block_size, blocks, tail)
        found = shelf.captured.get(key)
        if found is None:
            static = _static(batch, blocks, tail)
            _fill(static, batch)
            try:
                found = shelf.captured[key] = self._capture(run, static, pages, shelf)
            except RuntimeError as error:  # whatever CUDA or a module's own operations refuse while a graph is taken
                reason = str(error).strip().splitlines() or [type(error).__name__]
                self.note = f"passes run without a CUDA graph, slower: {reason[0]}"
                self._shelves.clear()
                return run(batch, pages)
        _fill(found.batch, batch)
        found.graph.replay()
        return found.output

    def _capture(self, run: Run, static: FlatBatch, pages: Pages, shelf: _Shelf) -> _Captured:
        with torch.cuda.device(static.tokens.device):
            if shelf.pool is None:
                shelf.pool = torch.cuda.graph_pool_handle()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    run(static, pages)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=shelf.pool):
                output = run(static, pages)
        return _Captured(graph, static, output)


def _capacity(keys: KeyIndex) -> tuple[int, int]:
    """Columns of tables and tails that hold those of `keys`."""
    return max(LEAST_BLOCKS, _power(keys.tables.shape[1])), max(LEAST_TAIL, _power(keys.tails.shape[1]))


def _power(number: int) -> int:
    """The least power of two that is not below it."""
    return 1 << (number - 1).bit_length()


def _static(batch: FlatBatch, blocks: int, tail: int) -> FlatBatch:
    """Tensors of their own for every pass of this shape; each row has a table of its own, so that any may share it."""
    num_rows, keys = batch.num_rows, batch.keys
    index = replace(
        keys,
        tables=keys.tables.new_zeros(num_rows, blocks),
        request=torch.arange(num_rows, dtype=torch.int32, device=keys.tables.device),
        linear=torch.empty_like(keys.linear),
        tails=keys.tails.new_zeros(num_rows, tail),
        length=torch.empty_like(keys.length),
    )
    tokens, positions, slots = (torch.empty_like(values) for values in (batch.tokens, batch.positions, batch.slots))
    return FlatBatch(tokens, positions, slots, index, batch.logit_rows)


def _fill(static: FlatBatch, batch: FlatBatch) -> None:
    """Copy a pass into the tensors of its graph; columns beyond its own keep old numbers, which no row reads."""
    static.tokens.copy_(batch.tokens)
    static.positions.copy_(batch.positions)
    static.slots.copy_(batch.slots)
    keys, own = batch.keys, static.keys
    own.tables[:, : keys.tables.shape[1]] = keys.tables.index_select(0, keys.request)
    own.linear.copy_(keys.linear)
    own.tails[:, : keys.tails.shape[1]] = keys.tails
    own.length.copy_(keys.length)
