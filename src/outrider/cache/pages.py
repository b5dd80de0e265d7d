"""The key and value tensors of one stack: made once, written by passes, compacted along an accepted path."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.base import Kernels
from outrider.kernels.parcel import send
from outrider.kernels.tree import PageTable, Trees, Walks

CACHE_LINE = 64
"""Bytes; a key that starts on a line is read in whole lines."""


@dataclass(frozen=True, slots=True)
class PageSpec:
    """Shape of one layer's keys and values: heads and their sizes (values may be of another size)."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class Pages:
    """Keys and values of every layer of one stack, by slot.

    Attributes:
        keys, values: per layer (S, Hkv, D), float32 or bfloat16.
    """

    def __init__(self, layers: list[PageSpec], num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        self.keys = [_zeros((num_slots, spec.num_kv_heads, spec.key_dim), dtype, device) for spec in layers]
        self.values = [_zeros((num_slots, spec.num_kv_heads, spec.value_dim), dtype, device) for spec in layers]
        self._table: PageTable | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def compact(self, source: list[int], target: list[int]) -> None:
        """Move the entries of slots `source` to slots `target` in every layer; the two may overlap."""
        if not source:
            return
        arrays = np.array(source, dtype=np.int64), np.array(target, dtype=np.int64)
        src, dst = send(arrays, self.keys[0].device)
        for pages in (*self.keys, *self.values):
            pages[dst] = pages[src]  # the right side is gathered before anything is written

    def follow(self, kernels: Kernels, slots: Tensor, trees: Trees, walks: Walks) -> None:
        """As `compact`, of paths that the device alone may know: see `Kernels.compact`."""
        if self._table is None:
            self._table = PageTable.of([*self.keys, *self.values])
        kernels.compact(self._table, slots, trees, walks)


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: a slot that was never written may be read under a mask, and 0 * NaN is NaN.

    On a CPU the system's own zero pages are used, so that slots take memory (and time) only once they are written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
