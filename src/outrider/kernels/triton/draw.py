"""The keyed draw in Triton: one program a row makes the noise, adds it and keeps the best token, all in float64.

The noise is that of `kernels/noise.py`: Philox4x32-10, word `v & 3` of block `v >> 2` for token `v`. In float64, as the
plain twin, since two scores of a large vocabulary can lie closer together than float32 can tell apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.launch import on_device

BLOCKS = 256
"""Philox blocks of four tokens that a program takes at a time."""


def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """logits: (T, V) float32; temperature: (T,) float32; seeds: (T,) int64; samples, positions: (T,) int32 -> (T,)
    int64; see `Kernels.draw`."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        assert logits.stride(1) == 1 or vocab_size == 1
        with on_device(logits.device):
            _draw[(num_rows,)](
                logits,
                temperature,
                seeds,
                samples,
                positions,
                tokens,
                vocab_size,
                logits.stride(0),
                BLOCKS=BLOCKS,
                num_warps=8,
            )
    return tokens


@triton.jit(do_not_specialize=["vocab_size", "row_stride"])
def _draw(logits, temperature, seeds, samples, positions, tokens, vocab_size, row_stride, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row).to(tl.float64)
    seed = tl.load(seeds + row)
    sample, position = tl.load(samples + row), tl.load(positions + row)
    is_warm = heat != 0.0
    divisor = tl.where(is_warm, heat, 1.0)
    values = logits + row * row_stride
    best = tl.full((BLOCKS,), float("-inf"), tl.float64)
    best_token = tl.zeros((BLOCKS,), tl.int32)
    has_nan = tl.zeros((BLOCKS,), tl.int32)
    block = tl.arange(0, BLOCKS)
    start = vocab_size * 0
    while start < vocab_size:
        noise_0 = tl.zeros((BLOCKS,), tl.float64)
        noise_1, noise_2, noise_3 = noise_0, noise_0, noise_0
        if is_warm:
            zero = block * 0
            w0, w1, w2, w3 = tl.philox(seed, block, zero + position, zero + sample, zero)
            noise_0, noise_1, noise_2, noise_3 = _gumbel(w0), _gumbel(w1), _gumbel(w2), _gumbel(w3)
        token = block * 4
        best, best_token, has_nan = _take(values, token, noise_0, divisor, vocab_size, best, best_token, has_nan)
        best, best_token, has_nan = _take(values, token + 1, noise_1, divisor, vocab_size, best, best_token, has_nan)
        best, best_token, has_nan = _take(values, token + 2, noise_2, divisor, vocab_size, best, best_token, has_nan)
        best, best_token, has_nan = _take(values, token + 3, noise_3, divisor, vocab_size, best, best_token, has_nan)
        block += BLOCKS
        start += 4 * BLOCKS
    top = tl.max(best, axis=0)
    lowest = tl.min(tl.where(best == top, best_token, vocab_size), axis=0)
    has_law = (tl.max(has_nan, axis=0) == 0) & (top != float("-inf"))
    tl.store(tokens + row, tl.where(has_law, lowest, -1).to(tl.int64))


@triton.jit
def _gumbel(word):
    """`-log(-log(u))` of `u = (word + 1/2) / 2**32`: standard Gumbel noise in float64."""
    return -tl.log(-tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def _take(values, token, noise, divisor, vocab_size, best, best_token, has_nan):
    """Score one token a lane; a lane sees its tokens in rising order, so a tie stays with the lowest."""
    score = tl.load(values + token, mask=token < vocab_size, other=float("-inf")).to(tl.float64) / divisor + noise
    is_better = score > best
    best = tl.where(is_better, score, best)
    best_token = tl.where(is_better, token, best_token)
    return best, best_token, has_nan | (score != score).to(tl.int32)
