"""The flat batch: every row of one forward pass, of all requests, without padding between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.base import KeyIndex
from outrider.kernels.parcel import send

_NO_TAIL = (0,)
"""The tail of a row whose keys all lie in its table; it is not read."""
MOST_SHAPES = 64
"""Shapes of a level's batch whose tensors are kept."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """T rows of one pass; a row is a prompt token, a request's last token, or a node of its draft tree.

    Attributes:
        tokens: (T,) int64. positions: (T,) int32. slots: (T,) int32, where this row's key and value are written.
        keys: where each row finds its keys (its own included, written before it is read).
        logit_rows: (M,) int64, the rows whose logits are asked for, or None for all rows.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    keys: KeyIndex
    logit_rows: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one pass yields.

    Attributes:
        logits: (M, V) float32 for the rows in `logit_rows`, V the model's true vocabulary (padding cut off).
        taps: hidden states (T, H) float32 after the layers asked for, by layer.
    """

    logits: Tensor
    taps: dict[int, Tensor]


class BatchBuilder:
    """Collects rows on the host, then makes the tensors of one pass; a row's keys are written by rows at or before it.

    Args:
        block_size: slots a block of every table.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._tables: list[Sequence[int]] = []
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._request: list[int] = []
        self._linear: list[int] = []
        self._tails: list[Sequence[int]] = []
        self._logit_rows: list[int] = []
        self._lengths: list[int] = []

    @property
    def num_rows(self) -> int:
        return len(self._tokens)

    @property
    def num_logit_rows(self) -> int:
        return len(self._logit_rows)

    def request(self, table: Sequence[int]) -> None:
        """The rows that follow belong to the request with this block table."""
        self._tables.append(table)

    def line(self, start: int, tokens: Sequence[int], num_logits: int) -> None:
        """Known tokens at positions `start ..`, written to the table's own slots; logits of the last `num_logits`."""
        table, size = self._tables[-1], self.block_size
        count = len(tokens)
        stop = start + count
        self._tokens += tokens
        self._positions += range(start, stop)
        self._slots += [table[position // size] * size + position % size for position in range(start, stop)]
        self._request += [len(self._tables) - 1] * count
        self._linear += range(start + 1, stop + 1)
        self._lengths += range(start + 1, stop + 1)
        self._tails += [_NO_TAIL] * count
        self._logit_rows += range(len(self._tokens) - num_logits, len(self._tokens))

    def node(self, token: int, linear: int, path: Sequence[int]) -> None:
        """A guess that sees `linear` known tokens through the table and then `path`, slots ending with its own."""
        self._tokens.append(token)
        self._positions.append(linear + len(path) - 1)
        self._lengths.append(linear + len(path))
        self._slots.append(path[-1])
        self._request.append(len(self._tables) - 1)
        self._linear.append(linear)
        self._tails.append(path)
        self._logit_rows.append(len(self._tokens) - 1)

    def whole(self, token: int, linear: int, slots: Sequence[int]) -> None:
        """Rows of one block, each written to its slot, that see `linear` known tokens and all rows of the block."""
        for row in range(len(slots)):
            self.node(token, linear, slots[: row + 1])
            self._tails[-1], self._lengths[-1] = slots, linear + len(slots)

    def tree(self, linear: int, tokens: Sequence[int], parents: Sequence[int], slots: Sequence[int]) -> None:
        """All nodes of a tree that hangs off the last known token; node i is written to `slots[i]`."""
        paths: list[list[int]] = []
        for token, parent, slot in zip(tokens, parents, slots, strict=True):
            paths.append([*paths[parent], slot] if parent >= 0 else [slot])
            self.node(token, linear, paths[-1])

    def build(self, device: torch.device) -> FlatBatch:
        """The tensors of the pass; rows of logits come in the order in which they were asked for."""
        count, width, depth = len(self._tokens), _longest(self._tables), _longest(self._tails)
        numbers = [*self._positions, *self._slots, *self._request, *self._linear]
        numbers += self._lengths
        numbers += _padded(self._tables, width)
        numbers += _padded(self._tails, depth)
        arrays: list[NDArray[Any]] = [np.array(self._tokens, dtype=np.int64), np.array(numbers, dtype=np.int32)]
        if len(self._logit_rows) < count:
            arrays.append(np.array(self._logit_rows, dtype=np.int64))
        tokens, whole, *asked = send(arrays, device)
        logit_rows = asked[0] if asked else None
        sizes = [count] * 5 + [len(self._tables) * width, count * depth]
        return _batch(tokens, whole, sizes, len(self._tables), self.block_size, logit_rows)


class LevelBatches:
    """Flat batches of guesses for one level of draft trees after the other.

    On a CPU a batch is the one given before with other numbers in its tensors, where the shape is the same: to make
    them anew takes longer than a small drafter's layers. So a batch holds until the next one is asked for.

    Args:
        block_size: slots a block of every table.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._shapes: dict[tuple[int, int, int, int], _Shape] = {}

    def batch(
        self,
        tables: Sequence[Sequence[int]],
        request: Sequence[int],
        tokens: Sequence[int],
        linear: Sequence[int],
        paths: Sequence[Sequence[int]],
        device: torch.device,
    ) -> FlatBatch:
        """Rows as `BatchBuilder.node` takes them, all with logits; row t is of the request with `tables[request[t]]`.

        tables: the same object for all levels of the same trees.
        """
        rows, width, depth = len(tokens), _room(_longest(tables)), _room(_longest(paths))
        key = (rows, len(tables), width, depth)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) == MOST_SHAPES:
                self._shapes.clear()
            shape = self._shapes[key] = _Shape(rows, len(tables), width, depth, self._block_size)
        if shape.tables is not tables:
            shape.tables = tables
            shape.numbers[5 * rows : -rows * depth] = [*_padded(tables, width)]
        length = [known + len(path) for known, path in zip(linear, paths, strict=True)]
        slots = [path[-1] for path in paths]
        shape.numbers[: 5 * rows] = [*(end - 1 for end in length), *slots, *request, *linear, *length]
        shape.numbers[-rows * depth :] = [*_padded(paths, depth)]
        shape.tokens[:] = tokens
        return shape.batch if device.type == "cpu" else shape.on(device)


class _Shape:
    """The arrays behind the batches of one shape: `rows` of `requests` with tables and tails of so many columns."""

    def __init__(self, rows: int, requests: int, width: int, depth: int, block_size: int) -> None:
        self._sizes = [rows] * 5 + [requests * width, rows * depth]
        self._requests = requests
        self._block_size = block_size
        self.tables: Sequence[Sequence[int]] | None = None
        self.numbers = np.zeros(sum(self._sizes), dtype=np.int32)
        self.tokens = np.zeros(rows, dtype=np.int64)
        self.batch = self.on(torch.device("cpu"))

    def on(self, device: torch.device) -> FlatBatch:
        tokens, whole = send((self.tokens, self.numbers), device)
        return _batch(tokens, whole, self._sizes, self._requests, self._block_size)


def tensor_of(values: Sequence[float], dtype: type[np.generic], device: torch.device) -> Tensor:
    """(N,): by way of NumPy, which reads a few numbers of Python in a quarter of the time."""
    return send((np.array(values, dtype=dtype),), device)[0]


def _batch(
    tokens: Tensor, whole: Tensor, sizes: list[int], requests: int, block_size: int, logit_rows: Tensor | None = None
) -> FlatBatch:
    """All that is int32 lies in one array: every tensor made, or sent to a device, costs more than what it holds."""
    positions, slots, request, linear, length, tables, tails = whole.split(sizes)
    keys = KeyIndex(
        tables=tables.view(requests, -1),
        request=request,
        linear=linear,
        tails=tails.view(sizes[0], -1),
        length=length,
        block_size=block_size,
    )
    return FlatBatch(tokens, positions, slots, keys, logit_rows)


def _room(length: int) -> int:
    """Columns for so many and some more to come."""
    return max(8, 1 << (length - 1).bit_length())


def _longest(rows: Sequence[Sequence[int]]) -> int:
    return max(map(len, rows))


def _padded(rows: Sequence[Sequence[int]], width: int) -> Iterator[int]:
    """The rows one after the other, each filled up with zeros."""
    return chain.from_iterable(row if len(row) == width else (*row, *repeat(0, width - len(row))) for row in rows)
