"""Ranking in Triton: the best columns of each block of a row by the scores of the keyed draw, then the best of those.

All in float64, as the plain twin. A block finds its `count` best by taking the best one so often; blocks are many and
wanted columns few, so that no row has to be sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.draw import gumbel
from outrider.kernels.triton.launch import on_device

COLUMNS = 1024
"""Columns of a block."""

_ARRAYS = ["logits", "temperature", "seeds", "samples", "positions", "ids"]


def rank(
    logits: Tensor,
    count: int,
    temperature: Tensor,
    seeds: Tensor,
    samples: Tensor,
    positions: Tensor,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(T, C) float32 -> scores (T, K) float64, columns (T, K) int64, masses (T,) float64; see `Kernels.rank`."""
    num_rows, num_columns = logits.shape
    count = min(count, num_columns)
    device = logits.device
    scores = torch.empty(num_rows, count, dtype=torch.float64, device=device)
    columns = torch.empty(num_rows, count, dtype=torch.int64, device=device)
    masses = torch.empty(num_rows, dtype=torch.float64, device=device)
    if num_rows and count:
        assert logits.stride(1) == 1 or num_columns == 1
        num_blocks, kept = triton.cdiv(num_columns, COLUMNS), min(count, COLUMNS)
        best = torch.empty(num_rows, num_blocks, kept, dtype=torch.float64, device=device)
        where = torch.empty(num_rows, num_blocks, kept, dtype=torch.int32, device=device)
        mass = torch.empty(2, num_rows, num_blocks, dtype=torch.float32, device=device)
        with on_device(device):
            _rank_block[(num_rows, num_blocks)](
                logits,
                temperature,
                seeds,
                samples,
                positions,
                seeds if ids is None else ids,
                best,
                where,
                mass,
                num_rows,
                num_columns,
                logits.stride(0),
                kept,
                COLUMNS=COLUMNS,
                HAS_IDS=ids is not None,
            )
            _rank_row[(num_rows,)](
                best,
                where,
                mass,
                scores,
                columns,
                masses,
                num_rows,
                num_columns,
                num_blocks,
                kept,
                count,
                FOUND=triton.next_power_of_2(num_blocks * kept),
                BLOCKS=triton.next_power_of_2(num_blocks),
                num_warps=8,
            )
    return scores, columns, masses


@triton.jit(do_not_specialize=["num_rows", "num_columns", "row_stride", "kept"], do_not_specialize_on_alignment=_ARRAYS)
def _rank_block(
    logits,
    temperature,
    seeds,
    samples,
    positions,
    ids,
    best,
    where,
    mass,
    num_rows,
    num_columns,
    row_stride,
    kept,
    COLUMNS: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """The `kept` best columns of one block, best first; its largest logit (NaN where it holds one) and the sum of
    e^(logit - largest)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    logit = tl.load(logits + row * row_stride + column, mask=is_column, other=float("-inf"))
    largest = tl.where(tl.max((logit != logit).to(tl.int32)) != 0, float("nan"), tl.max(logit))
    at = row * tl.num_programs(1) + block
    tl.store(mass + at, largest)
    powers = tl.where(logit == float("-inf"), 0.0, tl.exp(logit - largest))
    tl.store(mass + num_rows.to(tl.int64) * tl.num_programs(1) + at, tl.sum(powers))
    heat = tl.load(temperature + row).to(tl.float64)
    score = logit.to(tl.float64)
    if heat != 0.0:
        token = tl.load(ids + column, mask=is_column, other=0).to(tl.int32) if HAS_IDS else column
        word = _word(tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row), token)
        score = score / heat + gumbel(word)
    _take_best(score, column, best + at * kept, where + at * kept, kept, num_columns)


@triton.jit(do_not_specialize=["num_rows", "num_columns", "num_blocks", "kept", "count"])
def _rank_row(
    best,
    where,
    mass,
    scores,
    columns,
    masses,
    num_rows,
    num_columns,
    num_blocks,
    kept,
    count,
    FOUND: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The best of what the blocks of a row found."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    largest = tl.load(mass + row * num_blocks + block, mask=is_block, other=float("-inf"))
    has_nan = tl.max((largest != largest).to(tl.int32)) != 0
    largest = largest.to(tl.float64)
    total = tl.load(mass + (num_rows + row) * num_blocks + block, mask=is_block, other=0.0).to(tl.float64)
    top = tl.max(largest)
    powers = tl.where(largest == float("-inf"), 0.0, total * tl.exp(largest - top))
    tl.store(masses + row, tl.where(has_nan, float("nan"), top + tl.log(tl.sum(powers))))
    found = tl.arange(0, FOUND)
    is_found = found < num_blocks * kept
    score = tl.load(best + row * num_blocks * kept + found, mask=is_found, other=float("-inf"))
    column = tl.load(where + row * num_blocks * kept + found, mask=is_found, other=num_columns)
    score = tl.where(has_nan, float("nan"), score)
    _take_best(score, column, scores + row * count, columns + row * count, count, num_columns)


@triton.jit
def _take_best(score, column, scores, columns, count, num_columns):
    """Write the `count` best, best first, ties by column; the column is -1 where nothing but -inf, or NaN, is left."""
    taken = 0
    while taken < count:
        top = tl.max(score)
        first = tl.min(tl.where((score == top) & (score != float("-inf")), column, num_columns))
        tl.store(scores + taken, top)
        tl.store(columns + taken, tl.where(first < num_columns, first, -1).to(columns.dtype.element_ty))
        score = tl.where(column == first, float("-inf"), score)
        taken += 1


@triton.jit
def _word(seed, sample, position, token):
    """The random word of each token on its own: (C,) uint32."""
    zero = token * 0
    w0, w1, w2, w3 = tl.philox(seed, token >> 2, zero + position, zero + sample, zero)
    low, high = tl.where(token & 1 == 0, w0, w1), tl.where(token & 1 == 0, w2, w3)
    return tl.where(token & 2 == 0, low, high)
