"""The memory that all CUDA graphs over one set of kernels share, and how much of it they may hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch

UNPLANNED = 1 << 30
"""Bytes that graphs may hold before a memory plan says how many, and where nobody makes one."""


class GraphPool:
    """One pool for every graph of a target and its drafter: they replay one after another, so that what one needs while
    it runs is free for the next. It grows to the largest of them, which is why that one is best taken first.

    Attributes:
        limit: bytes of the device that all of them may hold. held: bytes that they hold, as the device counts them.
    """

    def __init__(self) -> None:
        self.limit = UNPLANNED
        self.held = 0
        self._handle: Any = None
        self._stream: Any = None
        self._graphs: WeakSet[Any] = WeakSet()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Within this block no graph is taken."""
        limit, self.limit = self.limit, 0
        try:
            yield
        finally:
            self.limit = limit

    def has_room(self, nbytes: int) -> bool:
        """Whether a graph of a pass that takes `nbytes` may be taken."""
        return self._held_now() + nbytes <= self.limit

    def keep(self, graph: Any, nbytes: int = 0) -> None:
        """Count a graph as living until nobody refers to it; `nbytes` were taken for it before it was `counted`."""
        self._graphs.add(graph)
        self.held += nbytes

    @contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        """What the device has less of (or more) after this block is held by graphs (or no longer)."""
        before = self._free(device)
        try:
            yield
        finally:
            self.held = max(0, self._held_now() + before - self._free(device))

    def handle(self) -> Any:
        """PyTorch's name of the pool; a new one where the last of its graphs is gone, since the old went with it."""
        if not self._graphs or self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def stream(self, device: torch.device) -> Any:
        """The stream on which passes are tried and taken; PyTorch keeps memory apart for every stream there is."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _held_now(self) -> int:
        if not self._graphs:
            self.held = 0
        return self.held

    def _free(self, device: torch.device) -> int:
        if device.type != "cuda":
            return 0
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what PyTorch keeps for later is nobody's
        return torch.cuda.mem_get_info(device)[0]


class SharesGraphs:
    """A set of kernels whose graphs share one pool."""

    @cached_property
    def graph_pool(self) -> GraphPool:
        return GraphPool()
