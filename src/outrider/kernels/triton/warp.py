"""Warping in Triton: bias, penalties and forbidden tokens of every row, then what is cut off it (`border`).

Every number of a row comes from that row alone, whatever the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton.border import MOST_TOKENS, border, cut, gather, measure
from outrider.kernels.triton.launch import UNFUSED, on_device
from outrider.kernels.warps import Warps

TOKENS = 1024
"""Tokens of a block."""
LANES = 16
"""Programs that share a row where each first reads what was found in all its blocks."""
CHUNK = 8192
"""Tokens between two rungs that are looked at together."""
SLICE = 512
"""Tokens whose masses and count are summed as one number."""
MEASURING, HALVING = 4, 16
"""Warps of the programs that measure a block, and of those that look for a row's border."""
RUNGS = 16
"""One for each nat below the top; below the last but one lies all the rest."""
_NUMBERS = ["vocab_size", "row_stride", "mask_stride"]
_ARRAYS = ["logits", "rows", "edges", "ids", "values", "factors", "addresses", "masks", "mask"]


def warp_rows(logits: Tensor, warps: Warps) -> Tensor:
    """logits: (M, V) float32 -> (W, V) float32; see `WarpsRows.warp`."""
    num_rows, vocab_size, device = warps.rows.shape[0], logits.shape[1], logits.device
    weights = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=device)
    if not num_rows:
        return weights
    assert vocab_size <= MOST_TOKENS
    assert logits.stride(1) == 1 or vocab_size == 1
    num_blocks = triton.cdiv(vocab_size, TOKENS)
    lanes, blocks = min(LANES, num_blocks), triton.next_power_of_2(num_blocks)
    maxima = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    state = torch.empty(7, num_rows, dtype=torch.int64, device=device)  # what the kernels of `border` tell of each row
    borders = state[4:]
    edits = (warps.edges, warps.ids, warps.values, warps.factors, warps.addresses, warps.masks, warps.mask)
    given = weights, maxima, warps.factors, warps.bounds, warps.tops
    steps, numbers, shape = warps.steps, (vocab_size, num_blocks), {"TOKENS": TOKENS, "BLOCKS": blocks}
    with on_device(device):
        _alter[(num_rows, num_blocks)](
            logits,
            warps.rows,
            *edits,
            weights,
            maxima,
            *borders,
            vocab_size,
            logits.stride(0),
            warps.masks.stride(0),
            TOKENS=TOKENS,
            **UNFUSED,
        )
        if steps.cuts_top or steps.cuts_mass:
            ladder = torch.empty(2, num_rows, num_blocks, RUNGS, dtype=torch.int64, device=device)
            window = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=device)
            measure[(num_rows, num_blocks)](
                *given, *ladder, *numbers, RUNGS=RUNGS, SLICE=SLICE, num_warps=MEASURING, **shape
            )
            for counts in (True,) * steps.cuts_top + (False,) * steps.cuts_mass:
                placed = window, *state[:4]
                gather[(num_rows, lanes)](
                    *given, *ladder, *placed, *numbers, lanes, COUNTS=counts, RUNGS=RUNGS, **shape
                )
                border[(num_rows,)](
                    *given, *placed, *borders, *numbers, COUNTS=counts, CHUNK=CHUNK, BLOCKS=blocks, num_warps=HALVING
                )
        if steps.cuts_top or steps.cuts_mass or steps.cuts_least:
            cut[(num_rows, num_blocks)](*given, *borders, *numbers, **shape)
    return weights


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def _alter(
    logits,
    rows,
    edges,
    ids,
    values,
    factors,
    addresses,
    masks,
    mask,
    weights,
    maxima,
    top_keys,
    mass_keys,
    lasts,
    vocab_size,
    row_stride,
    mask_stride,
    TOKENS: tl.constexpr,
):
    """One block of a row before it is truncated, and its largest weight, NaN where the logits hold one."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * TOKENS + tl.arange(0, TOKENS)
    inside = token < vocab_size
    source = tl.load(rows + row).to(tl.int64)
    logit = tl.load(logits + source * row_stride + token, mask=inside, other=float("-inf"))
    weight = logit
    edge, path = tl.load(edges + row * 4), tl.load(edges + row * 4 + 1)
    forbidden, end = tl.load(edges + row * 4 + 2), tl.load(edges + row * 4 + 3)
    while edge < path:
        weight = tl.where(token == tl.load(ids + edge), weight + tl.load(values + edge), weight)
        edge += 1
    address = tl.load(addresses + row * 2)
    if address != 0:
        count = tl.load(address.to(tl.pointer_type(tl.int32)) + token, mask=inside, other=0)
        while edge < forbidden:
            count += (token == tl.load(ids + edge)).to(tl.int32)
            edge += 1
        prompt = tl.load(addresses + row * 2 + 1).to(tl.pointer_type(tl.int8))
        in_prompt = tl.load(prompt + token, mask=inside, other=0) != 0
        repetition = tl.load(factors + row * 4 + 1)
        if repetition != 1.0:
            penalised = tl.where(weight < 0, weight * repetition, tl.div_rn(weight, repetition + token * 0.0))
            weight = tl.where((count > 0) | in_prompt, penalised, weight)
        weight = weight - count.to(tl.float32) * tl.load(factors + row * 4 + 2)
        weight = weight - (count > 0).to(tl.float32) * tl.load(factors + row * 4 + 3)
    edge = forbidden
    while edge < end:
        weight = tl.where(token == tl.load(ids + edge), float("-inf"), weight)
        edge += 1
    which = tl.load(mask + row)
    if which >= 0:
        bits = tl.load(masks + which.to(tl.int64) * mask_stride + (token >> 3), mask=inside, other=0).to(tl.int32)
        weight = tl.where((bits >> (token & 7)) & 1 != 0, weight, float("-inf"))
    weight = tl.where(logit != logit, logit, weight)
    tl.store(weights + row * vocab_size + token, weight, mask=inside)
    has_nan = tl.max((weight != weight).to(tl.int32))
    largest = tl.max(tl.where(weight != weight, float("-inf"), weight))
    tl.store(maxima + row * tl.num_programs(1) + block, tl.where(has_nan != 0, float("nan"), largest))
    if block == 0:
        tl.store(top_keys + row, row * 0 - 1)
        tl.store(mass_keys + row, row * 0 - 1)
        tl.store(lasts + row, row * 0 + vocab_size)
