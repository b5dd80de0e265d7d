"""Memory in large pages for what every pass reads from end to end: packed weights on a CPU."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

BLOCK = 64 << 20
"""Bytes that are asked of the system at once; what is never written takes no memory."""
ALIGNED = 64
"""Bytes of a cache line."""


class LargePages:
    """Tensors one behind another in blocks for which the system was asked for large pages.

    A pass of a small model reads a hundred megabytes, in pages of 4 KiB 24,000 of them, more than a processor keeps
    addresses of; so looking them up took a fifth of its time, and more or less of it by where the pages happened to
    lie (docs/measurements.md). Matrices of a layer are smaller than a large page, hence blocks.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """The same numbers there; the tensor itself where this system has no large pages to ask for, or none left."""
        if not hasattr(mmap, "MADV_HUGEPAGE") or tensor.device.type != "cpu" or not tensor.nbytes:
            return tensor
        if self._used + tensor.nbytes > self._block.nbytes:
            block = _block(max(BLOCK, tensor.nbytes))
            if block is None:
                return tensor
            self._block, self._used = block, 0
        place = self._block[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._used += tensor.nbytes + -tensor.nbytes % ALIGNED
        return place.copy_(tensor)


def _block(size: int) -> Tensor | None:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel built without them, or no address space
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)
