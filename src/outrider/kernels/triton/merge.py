"""The kernel of split attention's second half: what was said of a row is folded in the order of the keys.

Parts are folded into chunks, chunks into stretches, and those into the result: at each place the same sums, whether a
program before has folded a chunk or a stretch already, or nobody has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.triton.launch import release, wait
from outrider.kernels.triton.part import fold


@triton.jit(
    do_not_specialize=["window", "num_rows", "num_units", "num_places"], do_not_specialize_on_alignment=["length"]
)
def merge(
    values,
    stats,
    full,
    length,
    sinks,
    out,
    window,
    num_rows,
    num_units,
    num_places,
    SHAPE: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of one row; arguments as `attend_parts` has them.

    SHAPE: heads, D, the same as a power of two, keys of a part, parts of a unit, of a chunk, of a stretch. AHEAD:
    stretches of whole units that are asked for at once.
    """
    release(OVERLAP)
    HEADS: tl.constexpr = SHAPE[0]
    DIM: tl.constexpr = SHAPE[1]
    KEYS: tl.constexpr = SHAPE[3]
    UNIT: tl.constexpr = SHAPE[4]
    UNITS: tl.constexpr = SHAPE[6] // UNIT
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, SHAPE[2])[None, :]
    first_place = (row * HEADS + head) * num_places + tl.arange(0, 1)
    arrays = (values, stats, stats + num_rows.to(tl.int64) * HEADS * num_places, first_place, d)
    num_keys = tl.load(length + row)  # said long before, as `attend_parts` has it
    wait(OVERLAP)
    num_full = tl.load(full + row)
    first, last = num_keys * 0, (num_keys + KEYS - 1) // KEYS
    if HAS_WINDOW:
        first = tl.maximum(num_keys - window, 0) // KEYS
    top, total, mixed = _empty(SHAPE[2])
    if HAS_SINKS:
        top, total = tl.zeros((1,), tl.float32) + tl.load(sinks + head) * 1.4426950408889634, total + 1.0
    said = (top, total, mixed)
    stretch = first // SHAPE[6]
    if UNIT > 1:
        while (stretch + 1) * UNITS <= num_full:
            for ahead in tl.static_range(AHEAD):  # without a branch, so that all of them are asked for at once
                here = _empty(SHAPE[2])
                for index in tl.static_range(UNITS):
                    unit = (stretch + ahead) * UNITS + index
                    is_unit = (unit >= first // UNIT) & (stretch + ahead < num_full // UNITS)
                    here = fold(here, _load(arrays, unit, is_unit, DIM))
                said = fold(said, here)
            stretch = tl.minimum(stretch + AHEAD, num_full // UNITS)
    numbers = (first, last, num_full, num_units)
    while stretch * SHAPE[6] < last:
        said = fold(said, _stretch(arrays, numbers, stretch, SHAPE))
        stretch += 1
    total = tl.where(said[1] == 0.0, 1.0, said[1])
    tl.store(out + (row * HEADS + head) * DIM + d, said[2] / total[:, None], mask=d < DIM)


@triton.jit
def _stretch(arrays, numbers, stretch, SHAPE: tl.constexpr):
    """A stretch that holds single parts, and before them perhaps units."""
    UNIT: tl.constexpr = SHAPE[4]
    PARTS: tl.constexpr = SHAPE[5]
    first, last, num_full, num_units = numbers
    said = _empty(SHAPE[2])
    for chunk in tl.static_range(SHAPE[6] // PARTS):
        here = _empty(SHAPE[2])
        if UNIT == PARTS:
            unit = stretch * (SHAPE[6] // PARTS) + chunk
            here = _load(arrays, unit, (unit >= first // UNIT) & (unit < num_full), SHAPE[1])
        for index in tl.static_range(PARTS):
            part = stretch * SHAPE[6] + chunk * PARTS + index
            place = part if UNIT == 1 else num_units + part - num_full * UNIT
            is_part = (part >= first) & (part < last) & ((UNIT == 1) | (part >= num_full * UNIT))
            here = fold(here, _load(arrays, place, is_part, SHAPE[1]))
        said = fold(said, here)
    return said


@triton.jit
def _load(arrays, place, is_there, DIM: tl.constexpr):
    """What was said at a place; nothing where it is not there."""
    values, stats, totals, first_place, d = arrays
    at = first_place + place
    top = tl.load(stats + at, mask=is_there, other=float("-inf"))
    total = tl.load(totals + at, mask=is_there, other=0.0)
    return top, total, tl.load(values + at[:, None] * DIM + d, mask=is_there & (d < DIM), other=0.0)


@triton.jit
def _empty(DIM: tl.constexpr):
    return tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32), tl.zeros((1, DIM), tl.float32)
