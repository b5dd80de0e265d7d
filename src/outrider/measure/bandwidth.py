"""How fast a device reads its memory: the limit of everything that streams weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.measure.cycle import seconds_of

GPU_BYTES, CPU_BYTES = 2 * 2**30, 2**28
"""Far more than any cache holds."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The fastest of several ways to read a buffer: bytes per second, the buffer's size, and which way it was."""

    bytes_per_second: float
    nbytes: int
    way: str


def measure_bandwidth(device: torch.device, nbytes: int | None = None, repeats: int = 10) -> Bandwidth:
    """Read a buffer of `nbytes` (None: `GPU_BYTES` or `CPU_BYTES`) again and again, each way; medians."""
    size = nbytes or (GPU_BYTES if device.type == "cuda" else CPU_BYTES)
    buffer = torch.ones(size // 4, dtype=torch.int32, device=device)
    found = []
    for way, run, moved in _ways(buffer):
        found.append(Bandwidth(moved / seconds_of(device, run, repeats), size, way))
    return max(found, key=lambda b: b.bytes_per_second)


def _ways(buffer: Tensor) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Name, the reading, bytes that it moves."""
    floats = buffer.view(torch.float32)
    yield "torch.sum", floats.sum, buffer.nbytes
    if buffer.device.type == "cuda":
        from outrider.measure.read_kernel import SHAPES, read

        for block, rounds, warps in SHAPES:
            out = torch.empty(-(-buffer.numel() // (block * rounds)), dtype=torch.int32, device=buffer.device)

            def run(block: int = block, rounds: int = rounds, warps: int = warps, out: Tensor = out) -> None:
                read(buffer, out, block, rounds, warps)

            yield f"Triton, {rounds} x {block} numbers a program", run, buffer.nbytes
    else:
        copy = torch.empty_like(buffer)
        yield "copy, bytes read and written", lambda: copy.copy_(buffer), 2 * buffer.nbytes
