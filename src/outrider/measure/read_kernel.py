"""A Triton kernel that reads a buffer and does next to nothing else: one sum a program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SHAPES = ((4096, 8, 8), (8192, 4, 8), (2048, 16, 4), (16384, 8, 16))
"""Numbers a round, rounds a program, warps a program."""


@triton.jit
def _read(x, out, count, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    lanes = program * BLOCK * ROUNDS + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for turn in tl.static_range(ROUNDS):
        places = lanes + turn * BLOCK
        total += tl.load(x + places, mask=places < count, other=0)
    tl.store(out + program, tl.sum(total))


def read(buffer: Tensor, out: Tensor, block: int, rounds: int, warps: int) -> None:
    """buffer: (N,) int32; out: (N / (block * rounds),) int32, rounded up: the sums of its stretches."""
    _read[(out.shape[0],)](buffer, out, buffer.numel(), BLOCK=block, ROUNDS=rounds, num_warps=warps)
