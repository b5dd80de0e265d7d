"""The memory that all CUDA graphs over one set of kernels share, and how much of it they may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakSet

import torch

UNPLANNED = 1 << 30
"""Bytes that graphs may hold before a memory plan says how many, and where nobody makes one."""
WARM_UPS = 2
"""Runs before a capture: kernels are compiled and libraries set up in the first ones, which a graph must not hold."""
Made = TypeVar("Made")
_WARMING_UP: ContextVar[bool] = ContextVar("_WARMING_UP", default=False)


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

    def make_room(self, device: torch.device, nbytes: int, captured: dict[Any, Any]) -> bool:
        """Let graphs of `captured`, used longest ago first, give way until one of `nbytes` has room; whether it has."""
        while nbytes <= self.limit and not self.has_room(nbytes) and captured:
            with self.counted(device):
                del captured[next(iter(captured))]
        return self.has_room(nbytes)

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

    def warm_up(self, device: torch.device, run: Callable[[], object]) -> int:
        """Run what is to be captured until nothing is set up any more -> bytes that it takes while it runs."""
        if device.type != "cuda":
            return 0
        with torch.cuda.device(device):
            stream = self._side_stream(device)
            stream.wait_stream(torch.cuda.current_stream())
            before = torch.cuda.memory_allocated()
            with torch.cuda.stream(stream), _warming_up():
                for _ in range(WARM_UPS):
                    torch.cuda.reset_peak_memory_stats()
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            return torch.cuda.max_memory_allocated() - before

    def capture(self, device: torch.device, run: Callable[[], Made]) -> tuple[Any, Made]:
        """A graph of what `run` asks of the device, and the tensors that it gave, which every replay writes over.

        Raises:
            RuntimeError: whatever CUDA refuses while a graph is taken.
        """
        if not self._graphs or self._handle is None:  # the pool went with the last of its graphs
            self._handle = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            graph, stream = torch.cuda.CUDAGraph(), self._side_stream(device)
            # Where processes work together a thread of PyTorch's asks meanwhile what became of earlier sums.
            mode = "thread_local" if torch.distributed.is_initialized() else "global"
            with torch.cuda.graph(graph, pool=self._handle, stream=stream, capture_error_mode=mode):
                made = run()
        return graph, made

    def _side_stream(self, device: torch.device) -> Any:
        """Where runs are tried and captured; PyTorch keeps memory apart for every stream that there is."""
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


def is_warming_up() -> bool:
    """Whether what runs now is only tried before it is captured: it must wait for no other process."""
    return _WARMING_UP.get()


@contextmanager
def _warming_up() -> Iterator[None]:
    token = _WARMING_UP.set(True)
    try:
        yield
    finally:
        _WARMING_UP.reset(token)


class SharesGraphs:
    """A set of kernels whose graphs share one pool."""

    @cached_property
    def graph_pool(self) -> GraphPool:
        return GraphPool()
