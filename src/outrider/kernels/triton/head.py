"""An output head that draws: the keyed draw of its logits, which are never written.

A program has the logits of some rows and outputs. It looks at them in float32 as `draw.py` does, and names the best of
each row; where float32 cannot tell which of several that is, as it seldom happens, float64 says it. What the programs
named is compared in float64 last.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.draw import can_win, gumbel, rough_gumbel
from outrider.kernels.triton.launch import begin, launch_options, on_device
from outrider.kernels.triton.multiply import products

REGISTERS = 128
"""Of a thread, so that another program streams weights while one draws."""
_ARRAYS = ["temperature", "seeds", "samples", "positions"]


def draw_rows(
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    keyed: tuple[Tensor, Tensor, Tensor, Tensor],
    vocab_size: int,
    sizes: tuple[int, int, int],
    options: dict[str, Any],
) -> Tensor:
    """(T,) int64, what `draw` gives for the first `vocab_size` outputs of a linear.

    Args:
        operands: inputs (T, K), weights, scales and bias, and options: as `multiply.products` takes them.
        keyed: temperature, seeds, samples and positions of the rows, as `draw` takes them.
        sizes: rows and outputs of a program, and bytes of an output's weights that it asks for ahead.
    """
    x = operands[0]
    num_rows, num_tiles = x.shape[0], triton.cdiv(vocab_size, sizes[1])
    tops = torch.empty(num_rows, num_tiles, device=x.device)
    winners = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=x.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    overlap = options["OVERLAP"]
    with on_device(x.device):
        _draw_tile[(triton.cdiv(num_rows, sizes[0]), num_tiles)](
            *(*operands, *keyed, tops, winners, num_rows, vocab_size, x.stride(0), num_tiles, sizes[2]),
            maxnreg=REGISTERS,
            **options,
        )
        tiles = triton.next_power_of_2(num_tiles)
        _settle[(num_rows,)](
            *(tops, winners, *keyed, tokens, num_tiles),
            TILES=tiles,
            OVERLAP=overlap,
            num_warps=min(16, max(4, tiles // 128)),
            **launch_options(overlap),
        )
    return tokens


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "bytes_ahead"], do_not_specialize_on_alignment=_ARRAYS)
def _draw_tile(
    x,
    weight,
    scales,
    bias,
    temperature,
    seeds,
    samples,
    positions,
    tops,
    winners,
    num_rows,
    vocab_size,
    x_stride,
    num_tiles,
    bytes_ahead,
    SHAPE: tl.constexpr,
    FLAGS: tl.constexpr,
    IS_LATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """tops: (T, tiles) float32, the logit of what scores best of each row among a tile's outputs, NaN where one is NaN;
    winners: (T, tiles) int32, whose it is, the least of equals; -1 where nothing may be drawn."""
    OUTPUTS: tl.constexpr = SHAPE[1]
    ROWS: tl.constexpr = SHAPE[2]
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = t < num_rows
    own = tl.minimum(n, vocab_size - 1).to(tl.int64)
    logits = products(x, weight, scales, bias, t, own, is_row, x_stride, bytes_ahead, SHAPE, FLAGS, IS_LATE, OVERLAP)
    logits = tl.where((n < vocab_size)[:, None], logits, float("-inf"))
    heat = tl.load(temperature + t, mask=is_row, other=0.0)
    is_warm = heat != 0.0
    keys = (
        tl.load(seeds + t, mask=is_row, other=0),
        tl.load(samples + t, mask=is_row, other=0),
        tl.load(positions + t, mask=is_row, other=0),
    )
    scores = logits / tl.where(is_warm, heat, 1.0)[None, :]
    if tl.max(is_warm.to(tl.int32)) > 0:
        noise = rough_gumbel(_words(keys, tl.program_id(1) * (OUTPUTS // 4), OUTPUTS, ROWS))
        scores += tl.where(is_warm[None, :], noise, 0.0)
    best = tl.max(scores, axis=0)
    # Without noise the rough look is exact, and the first of equals is the one.
    is_near = tl.where(is_warm[None, :], can_win(scores, best[None, :]), scores == best[None, :])
    is_near = is_near & (logits != float("-inf"))
    winner = tl.min(tl.where(is_near, n[:, None], 1 << 30), axis=0)
    is_open = is_warm & (tl.sum(is_near.to(tl.int32), axis=0) > 1)
    r = tl.arange(0, ROWS)
    row = tl.min(tl.where(is_open, r, ROWS))
    while row < ROWS:
        is_it = r == row
        chosen = _exact_best(
            logits, is_near, is_it, tl.program_id(0) * ROWS + row, n, temperature, seeds, samples, positions
        )
        winner = tl.where(is_it, chosen, winner)
        is_open = is_open & (is_it == 0)
        row = tl.min(tl.where(is_open, r, ROWS))
    top = tl.max(tl.where(n[:, None] == winner[None, :], logits, float("-inf")), axis=0)
    has_nan = tl.max((logits != logits).to(tl.int32), axis=0)
    at = t.to(tl.int64) * num_tiles + tl.program_id(1)
    tl.store(tops + at, tl.where(has_nan != 0, float("nan"), top), mask=is_row)
    tl.store(winners + at, tl.where(winner < 1 << 30, winner, -1), mask=is_row)


@triton.jit
def _exact_best(logits, is_near, is_it, row, n, temperature, seeds, samples, positions):
    """The lowest id with the best float64 score among what is near of one warm row."""
    column = tl.max(tl.where(is_it[None, :], logits, float("-inf")), axis=1)
    near = tl.max((is_near & is_it[None, :]).to(tl.int32), axis=1) != 0
    word = _word(tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row), n)
    score = column.to(tl.float64) / tl.load(temperature + row).to(tl.float64) + gumbel(word)
    best = tl.max(tl.where(near, score, float("-inf")))
    return tl.min(tl.where(near & (score == best), n, 1 << 30))


@triton.jit
def _words(keys, first_block, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):
    """The random words of a tile's outputs: (OUTPUTS, ROWS) uint32."""
    seed, sample, position = keys
    zero = tl.zeros((OUTPUTS // 4, ROWS), tl.int32)
    block = zero + (first_block + tl.arange(0, OUTPUTS // 4))[:, None]
    w0, w1, w2, w3 = tl.philox(seed[None, :], block, zero + position[None, :], zero + sample[None, :], zero)
    fours = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.permute(fours, (0, 2, 3, 1)), (OUTPUTS, ROWS))


@triton.jit
def _word(seed, sample, position, token):
    """The random words of tokens of one row: uint32."""
    zero = token * 0
    w0, w1, w2, w3 = tl.philox(seed, token // 4, zero + position, zero + sample, zero)
    return tl.where(token % 4 < 2, tl.where(token % 4 == 0, w0, w1), tl.where(token % 4 == 2, w2, w3))


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=_ARRAYS)
def _settle(
    tops,
    winners,
    temperature,
    seeds,
    samples,
    positions,
    tokens,
    num_tiles,
    TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best of what the tiles of a row named."""
    begin(OVERLAP)
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    top = tl.load(tops + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    winner = tl.load(winners + row * num_tiles + tile, mask=tile < num_tiles, other=-1)
    heat = tl.load(temperature + row).to(tl.float64)
    score = top.to(tl.float64)
    if heat != 0.0:
        word = _word(tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row), tl.maximum(winner, 0))
        score = score / heat + gumbel(word)
    score = tl.where(winner >= 0, score, float("-inf"))
    best = tl.min(tl.where((winner >= 0) & (score == tl.max(score)), winner, 1 << 30))
    has_nan = tl.max((top != top).to(tl.int32))
    tl.store(tokens + row, tl.where((has_nan != 0) | (best == 1 << 30), -1, best).to(tl.int64))
