"""What crosses into the native library: operations, the batch that they run over, and programs of them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from outrider.errors import KernelError
from outrider.kernels.base import KeyIndex


class Op(ctypes.Structure):
    """Mirrors `Op` of cpu/team.h."""

    _fields_ = (
        ("code", ctypes.c_int64),
        ("n", ctypes.c_int64 * 8),
        ("f", ctypes.c_double * 4),
        ("p", ctypes.c_void_p * 8),
    )


class Batch(ctypes.Structure):
    """Mirrors `Batch` of cpu/team.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "slots")),
        *((name, ctypes.c_void_p) for name in ("tables", "request", "linear", "tails", "length")),
        *((name, ctypes.c_int64) for name in ("tables_stride", "tails_stride", "block_size")),
    )


def make_batch(
    rows: int,
    tokens: Tensor | None = None,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    keys: KeyIndex | None = None,
) -> Batch:
    assert tokens is None or (tokens.dtype == torch.int64 and tokens.is_contiguous())
    index = () if keys is None else (keys.tables, keys.request, keys.linear, keys.tails, keys.length)
    for tensor in (positions, slots, *index):
        assert tensor is None or (tensor.dtype == torch.int32 and tensor.is_contiguous())
    first = [None if t is None else t.data_ptr() for t in (tokens, positions, slots)]
    if keys is None:
        return Batch(rows, *first)
    strides = (keys.tables.shape[1], keys.tails.shape[1], keys.block_size)
    return Batch(rows, *first, *(t.data_ptr() for t in index), *strides)


def run(library: ctypes.CDLL, ops: object, count: int, batch: Batch, threads: int) -> None:
    """Run `count` operations from the pointer `ops`.

    Raises:
        KernelError: if memory ran out.
    """
    if library.outrider_run(ops, count, ctypes.byref(batch), threads):
        raise KernelError("the native kernels ran out of memory: lower max_rows or max_context")


class NativeProgram:
    """Recorded operations; `tensors` keeps their operands alive."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._recorded: list[Op] = []
        self._tensors: list[Tensor] = []
        self._ops: ctypes.Array[Op] | None = None
        self._operands: tuple[Tensor | KeyIndex | None, ...] = (None,) * 4
        self._batch: Batch | None = None

    def __len__(self) -> int:
        return len(self._recorded)

    def add(self, op: Op, tensors: list[Tensor]) -> None:
        self._recorded.append(op)
        self._tensors += tensors
        self._ops = None

    def run(
        self, first: int, last: int, positions: Tensor, slots: Tensor, keys: KeyIndex, tokens: Tensor | None = None
    ) -> None:
        """Run operations `[first, last)` over the first T = `positions.shape[0]` rows of their buffers."""
        if self._ops is None:
            self._ops = (Op * len(self._recorded))(*self._recorded)
        operands = (tokens, positions, slots, keys)
        # The very tensors of the run before, refilled: its pointers hold.
        if self._batch is None or any(a is not b for a, b in zip(operands, self._operands, strict=True)):
            self._operands, self._batch = operands, make_batch(positions.shape[0], *operands)
        start = ctypes.byref(self._ops, first * ctypes.sizeof(Op))
        run(self._library, start, last - first, self._batch, self._threads)
