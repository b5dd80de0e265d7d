"""Placing rows in Triton: a program a row, instead of some thirty operations on a few numbers each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.places import NOTHING, Placed, Relative, Standing
from outrider.kernels.triton.launch import on_device

_NUMBERS = [
    "num_rows",
    "width",
    "depth",
    "columns",
    "vocab_size",
    "block_size",
    "token_stride",
    "depth_stride",
    "depth_step",
    "place_stride",
    "place_step",
    "path_stride",
    "path_step",
]
_ARRAYS = ["lengths", "ends", "tables", "tokens", "depths", "places", "paths", "deepest"]


def place(standing: Standing, rows: Relative, vocab_size: int) -> Placed:
    """See `Kernels.place`."""
    num, width, depth = rows.paths.shape
    device, count = rows.tokens.device, num * width
    named, tokens = torch.empty(2, count, dtype=torch.int64, device=device)
    numbers = torch.empty(5, count, dtype=torch.int32, device=device)
    tails = torch.empty(count, depth, dtype=torch.int32, device=device)
    if count:
        assert rows.tokens.stride(1) == 1 or width == 1
        assert rows.paths.stride(2) == 1 or depth == 1
        assert all(t.is_contiguous() for t in (standing.lengths, standing.ends, standing.tables, rows.deepest))
        with on_device(device):
            _place[(count,)](
                standing.lengths,
                standing.ends,
                standing.tables,
                rows.tokens,
                rows.depths,
                rows.places,
                rows.paths,
                rows.deepest,
                named,
                tokens,
                numbers,
                tails,
                *(count, width, depth, standing.tables.shape[1], vocab_size, standing.block_size),
                rows.tokens.stride(0),
                *rows.depths.stride(),
                *rows.places.stride(),
                *rows.paths.stride()[:2],
                NONE=NOTHING,
                KNOWN=rows.are_known,
                TAIL=triton.next_power_of_2(depth),
                num_warps=1,
            )
    positions, slots, request, linear, length = numbers
    return Placed(named, tokens, positions, slots, request, linear, length, tails)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def _place(
    lengths,
    ends,
    tables,
    tokens,
    depths,
    places,
    paths,
    deepest,
    named,
    used,
    numbers,
    tails,
    num_rows,
    width,
    depth,
    columns,
    vocab_size,
    block_size,
    token_stride,
    depth_stride,
    depth_step,
    place_stride,
    place_step,
    path_stride,
    path_step,
    NONE: tl.constexpr,
    KNOWN: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One row: its token, position, slot, and where it finds its keys."""
    row = tl.program_id(0)
    request, place = row // width, row % width
    known, end = tl.load(lengths + request), tl.load(ends + request)
    token = tl.load(tokens + request * token_stride + place)
    deep = tl.load(depths + request * depth_stride + place * depth_step)
    is_live = (token >= 0) & (token < vocab_size) & (deep <= tl.load(deepest + request)) & (known + deep < end)
    position = known - 1 + deep
    own = known - 1 + tl.load(places + request * place_stride + place * place_step)
    table = tables + request.to(tl.int64) * columns
    slot = _slot(table, own, columns, block_size)
    tl.store(named + row, tl.where(is_live, token, NONE))
    tl.store(used + row, tl.where(is_live, token, 0))
    linear = position + 1 if KNOWN else known
    tl.store(numbers + row, tl.where(is_live, position, 0).to(tl.int32))
    tl.store(numbers + num_rows + row, tl.where(is_live, slot, 0).to(tl.int32))
    tl.store(numbers + 2 * num_rows + row, request.to(tl.int32))
    tl.store(numbers + 3 * num_rows + row, tl.where(is_live, linear, 0).to(tl.int32))
    tl.store(numbers + 4 * num_rows + row, tl.where(is_live, position + 1, 1).to(tl.int32))
    step = tl.arange(0, TAIL)
    path = tl.load(paths + request * path_stride + place * path_step + step, mask=step < depth, other=0)
    tail = _slot(table, known - 1 + path, columns, block_size)
    tl.store(tails + row * depth + step, tl.where(is_live, tail, 0).to(tl.int32), mask=step < depth)


@triton.jit
def _slot(table, place, columns, block_size):
    """The slot of a place in a sequence; one of the trash block where the table ends before it."""
    place = tl.maximum(place, 0)
    return tl.load(table + tl.minimum(place // block_size, columns - 1)) * block_size + place % block_size
