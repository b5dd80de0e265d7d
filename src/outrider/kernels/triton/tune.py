"""Measures tiles for those who write the table in `linear`; nothing here is called, and nothing kept, while serving."""

from __future__ import annotations

import itertools
import statistics

import torch
import triton
from torch import Tensor

from outrider.kernels.triton.linear import Tile, TritonLinear

SHARED_MEMORY = 227 * 1024
"""Bytes that one program may hold on an H100 and an H200."""
SPOILED = 256 << 20
"""Bytes of weights between two uses of the same ones: more than any cache holds."""
REPEATS = 7


def candidates(num_rows: int) -> list[Tile]:
    """Tiles worth trying for so many rows."""
    rows = min(256, max(16, triton.next_power_of_2(num_rows)))
    found = []
    for outputs, inputs, stages in itertools.product((16, 32, 64, 128), (64, 128, 256), (3, 4, 5, 6)):
        held = (stages - 1) * (outputs + rows) * inputs * 2
        # Few bytes on their way leave memory idle; large products want two groups of warps.
        if held <= SHARED_MEMORY and outputs * inputs >= 4096 and outputs * rows <= 32768:
            found.append(Tile(outputs, rows, inputs, 8 if outputs * rows >= 16384 else 4, stages))
    return found


def tune(
    num_rows: int, num_outputs: int, num_inputs: int, device: torch.device, tiles: list[Tile] | None = None
) -> list[tuple[float, Tile]]:
    """Seconds of one bfloat16 linear by tile, fastest first, its weights out of every cache.

    Tiles that a device refuses (too many registers, too much memory) or that change a bit of the first one's result are
    left out.

    Args:
        tiles: None tries `candidates`.
    """
    copies = -(-SPOILED // (num_outputs * num_inputs * 2)) + 1
    shape = (num_outputs, num_inputs)
    linears = [TritonLinear("bfloat16", torch.randn(shape, device=device).bfloat16()) for _ in range(copies)]
    x = torch.randn(num_rows, num_inputs, device=device).bfloat16()
    out = torch.empty(num_rows, num_outputs, device=device)
    expected: Tensor | None = None
    found = []
    for tile in tiles or candidates(num_rows):
        try:
            linears[0].run(x, None, out, tile)
            torch.cuda.synchronize(device)
        except (RuntimeError, triton.TritonError):
            continue
        expected = out.clone() if expected is None else expected
        if torch.equal(out, expected):
            found.append((_seconds(linears, x, out, tile), tile))
    return sorted(found, key=lambda item: item[0])


def _seconds(linears: list[TritonLinear], x: Tensor, out: Tensor, tile: Tile) -> float:
    """Of one call, under a graph: the launches themselves would take longer."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(x.device), torch.cuda.graph(graph):
        for linear in linears:
            linear.run(x, None, out, tile)
    graph.replay()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(linears))
    return statistics.median(times)
