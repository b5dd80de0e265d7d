"""The keyed draw in Triton: a rough look at every token in float32, then float64 where the best one can be.

The noise is that of `kernels/noise.py`: Philox4x32-10, word `v & 3` of block `v >> 2` for token `v`. Two scores of a
large vocabulary can lie closer together than float32 can tell apart, so float64 decides, as in the plain twin; but it
needs to see only the few blocks of the vocabulary whose best comes near the best of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.launch import on_device

TOKENS = 1024
"""Tokens of a block."""
PROGRAMS = 1024
"""Programs that fill a card; one looks at several blocks where there would be more of them."""

_NUMBERS = ["vocab_size", "row_stride", "num_blocks", "lanes"]
_ARRAYS = ["logits", "temperature", "seeds", "samples", "positions"]


def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """logits: (T, V) float32; temperature: (T,) float32; seeds: (T,) int64; samples, positions: (T,) int32 -> (T,)
    int64; see `Kernels.draw`."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        assert logits.stride(1) == 1 or vocab_size == 1
        assert all(t.is_contiguous() for t in (temperature, seeds, samples, positions))
        num_blocks = triton.cdiv(vocab_size, TOKENS)
        lanes = min(num_blocks, triton.cdiv(PROGRAMS, num_rows))
        bests = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
        keyed = logits, temperature, seeds, samples, positions
        numbers = vocab_size, logits.stride(0), num_blocks
        with on_device(logits.device):
            _look[(num_rows, lanes)](*keyed, bests, *numbers, lanes, TOKENS=TOKENS)
            _decide[(num_rows,)](
                *keyed, bests, tokens, *numbers, TOKENS=TOKENS, BLOCKS=triton.next_power_of_2(num_blocks)
            )
    return tokens


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def _look(
    logits,
    temperature,
    seeds,
    samples,
    positions,
    bests,
    vocab_size,
    row_stride,
    num_blocks,
    lanes,
    TOKENS: tl.constexpr,
):
    """The best score of each block within what `_decide` allows for; NaN where the block holds one."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    is_warm = heat != 0.0
    divisor = tl.where(is_warm, heat, 1.0)
    seed, sample, position = tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row)
    block = tl.program_id(1)
    while block < num_blocks:
        token = block * TOKENS + tl.arange(0, TOKENS)
        score = tl.load(logits + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
        has_nan = tl.max((score != score).to(tl.int32))
        score = score / divisor
        if is_warm:
            score += rough_gumbel(_words(seed, sample, position, block, TOKENS))
        tl.store(bests + row * num_blocks + block, tl.where(has_nan != 0, float("nan"), tl.max(score)))
        block += lanes


@triton.jit(do_not_specialize=["vocab_size", "row_stride", "num_blocks"], do_not_specialize_on_alignment=_ARRAYS)
def _decide(
    logits,
    temperature,
    seeds,
    samples,
    positions,
    bests,
    tokens,
    vocab_size,
    row_stride,
    num_blocks,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Score the tokens of the blocks that can hold the best of a row, in float64 and in their order."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row).to(tl.float64)
    is_warm = heat != 0.0
    divisor = tl.where(is_warm, heat, 1.0)
    seed, sample, position = tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row)
    blocks = tl.arange(0, BLOCKS)
    best = tl.load(bests + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    has_nan = tl.max((best != best).to(tl.int32))
    rough = tl.max(best)
    is_near = (blocks < num_blocks) & can_win(best, rough) & (best != float("-inf"))
    block = tl.min(tl.where(is_near, blocks, BLOCKS))
    top, winner = divisor * 0.0 + float("-inf"), block * 0 - 1
    while block < BLOCKS:
        token = block * TOKENS + tl.arange(0, TOKENS)
        logit = tl.load(logits + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
        score = logit.to(tl.float64) / divisor
        if is_warm:
            score += gumbel(_words(seed, sample, position, block, TOKENS))
        here = tl.max(score)
        if here > top:  # blocks come in rising order, so a tie stays with the lowest token
            top = here
            winner = tl.min(tl.where(score == here, token, vocab_size))
        block = tl.min(tl.where(is_near & (blocks > block), blocks, BLOCKS))
    tl.store(tokens + row, tl.where(has_nan != 0, -1, winner).to(tl.int64))


@triton.jit
def can_win(score, best):
    """Whether an exact score may be the best, where the rough ones are `score`, and `best` of all.

    Noise is known to 1e-4 and a quotient to 1e-6 of itself; a quotient differs from its score by the noise, which lies
    between -4 and 23. "Not below" holds of NaN, too: where float32 overflows everything is looked at.
    """
    return (score < best - 1e-3 - 4e-6 * tl.abs(best)) == 0


@triton.jit
def _words(seed, sample, position, block, TOKENS: tl.constexpr):
    """The random words of the tokens of a block, in their order: (TOKENS,) uint32."""
    counter = block * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position, zero + sample, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TOKENS,))


@triton.jit
def gumbel(word):
    """`-log(-log(u))` of `u = (word + 1/2) / 2**32`: standard Gumbel noise in float64."""
    return -tl.log(-tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def rough_gumbel(word):
    """`gumbel` in float32, to within 1e-4: near u = 1 by the distance from it, which float32 holds and u does not."""
    below, above = (word.to(tl.float32) + 0.5) * 2.0**-32, ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    exponential = -tl.log(tl.where(below < 0.5, below, 1.0 - above))
    return -tl.log(tl.where(above < 0.0078125, above + 0.5 * above * above, exponential))
