"""Where a row of weights is cut by top-k, top-p and min-p, in Triton, without sorting it.

Masses are summed down to a few rungs of the row's ranking, in whole numbers, which have one sum in any order; the
tokens between the two rungs where a border lies are written one behind the other, and it is found among them by
halving.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_TOKENS = 2**20 - 1
"""So many masses of a whole still fit in 63 bits."""

_NUMBERS = ["vocab_size", "num_blocks", "lanes"]
_ARRAYS = ["factors", "bounds", "tops"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def measure(
    weights,
    maxima,
    factors,
    bounds,
    tops,
    masses,
    counts,
    vocab_size,
    num_blocks,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUNGS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Of one block: mass and number of the tokens down to each rung.

    SLICE: no more than 512, of which the masses, up to 2^43 each, and the count fit into one number of 63 bits.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    has_nan, top = _top(maxima, row, num_blocks, BLOCKS)
    if (has_nan == 0) & ((tl.load(bounds + row * 2) < 1.0) | (tl.load(tops + row) > 0)):
        slices, lane = tl.arange(0, TOKENS // SLICE)[:, None], tl.arange(0, SLICE)[None, :]
        token = block * TOKENS + slices * SLICE + lane
        inside = token < vocab_size
        weight = tl.load(weights + row * vocab_size + token, mask=inside, other=float("-inf"))
        depth = _depth(weight, top, tl.load(factors + row * 4))
        both = tl.where(inside, _mass(depth) * (2 * SLICE) + 1, 0)  # a mass, and one of a count, in one sum
        least = tl.min(tl.min(tl.where(inside, depth, float("inf")), 1), 0)
        at = (row * num_blocks + block) * RUNGS
        for rung in tl.static_range(RUNGS):
            mass, count = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
            if (least <= rung + 1.0) | (rung == RUNGS - 1):  # the rungs above hold nothing of this block
                found = tl.sum(tl.where((depth <= rung + 1.0) | (rung == RUNGS - 1), both, 0), 1)
                mass, count = tl.sum(found // (2 * SLICE), 0), tl.sum(found % (2 * SLICE), 0)
            tl.store(masses + at + rung, mass)
            tl.store(counts + at + rung, count)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def gather(
    weights,
    maxima,
    factors,
    bounds,
    tops,
    masses,
    counts,
    window,
    above_of,
    need_of,
    num_of,
    total_of,
    vocab_size,
    num_blocks,
    lanes,
    COUNTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUNGS: tl.constexpr,
):
    """Write the tokens between the two rungs where a border lies into the window, in their order.

    Told of each row: mass (or count) above the window, what is needed down to the border, tokens in the window; and of
    a top-k the mass above.
    """
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    has_nan, top = _top(maxima, row, num_blocks, BLOCKS)
    bound, most = tl.load(bounds + row * 2), tl.load(tops + row)
    if (has_nan == 0) & ((most > 0) if COUNTS else (bound < 1.0)):
        blocks, rungs = tl.arange(0, BLOCKS), tl.arange(0, RUNGS)
        at = (row * num_blocks + blocks[:, None]) * RUNGS + rungs[None, :]
        number = tl.load(counts + at, mask=blocks[:, None] < num_blocks, other=0)
        measured = tl.load((counts if COUNTS else masses) + at, mask=blocks[:, None] < num_blocks, other=0)
        reached = tl.sum(measured, 0)
        if COUNTS:
            need = most.to(tl.int64)
            mass = tl.load(masses + at, mask=blocks[:, None] < num_blocks, other=0)
        else:
            mass = measured
            total = tl.max(reached)
            if most > 0:
                total = tl.load(total_of + row)
            need = tl.ceil(total.to(tl.float64) * bound).to(tl.int64)
            need = tl.maximum(tl.minimum(need, total), 1)
        rung = tl.sum((reached < need).to(tl.int32))
        above = tl.sum(tl.where(rungs == rung - 1, reached, 0))
        sign = (rungs == rung).to(tl.int64) - (rungs == rung - 1).to(tl.int64)
        found = tl.sum(number * sign[None, :], 1)
        if lane == 0:
            tl.store(above_of + row, above)
            tl.store(need_of + row, need)
            tl.store(num_of + row, tl.sum(found))
            if COUNTS:
                tl.store(total_of + row, tl.sum(tl.where(rungs == rung - 1, tl.sum(mass, 0), 0)))
        heat = tl.load(factors + row * 4)
        each = (num_blocks + lanes - 1) // lanes
        block = lane * each
        while block < tl.minimum((lane + 1) * each, num_blocks):
            if tl.sum(tl.where(blocks == block, found, 0)) > 0:
                first = tl.sum(tl.where(blocks < block, found, 0))
                token = block * TOKENS + tl.arange(0, TOKENS)
                inside = token < vocab_size
                weight = tl.load(weights + row * vocab_size + token, mask=inside, other=float("-inf"))
                depth = _depth(weight, top, heat)
                here = inside & ((depth > rung.to(tl.float64)) | (rung == 0))
                here &= (depth <= rung.to(tl.float64) + 1.0) | (rung == RUNGS - 1)
                place = first + tl.cumsum(here.to(tl.int32), 0) - 1
                tl.store(window + row * vocab_size + place, token, mask=here)
            block += 1


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def border(
    weights,
    maxima,
    factors,
    bounds,
    tops,
    window,
    above_of,
    need_of,
    num_of,
    total_of,
    top_keys,
    mass_keys,
    lasts,
    vocab_size,
    num_blocks,
    COUNTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The largest key down to which there is as much as is needed, found by halving; of what is tied there, the last.

    Of a top-k everything that is tied stays, and its mass is told in `total_of`.
    """
    row = tl.program_id(0).to(tl.int64)
    has_nan, top = _top(maxima, row, num_blocks, BLOCKS)
    if (has_nan == 0) & ((tl.load(tops + row) > 0) if COUNTS else (tl.load(bounds + row * 2) < 1.0)):
        heat = tl.load(factors + row * 4)
        above, need, num = tl.load(above_of + row), tl.load(need_of + row), tl.load(num_of + row)
        base, ids = weights + row * vocab_size, window + row * vocab_size
        low, high, start = need * 0 + 4294967296, need * 0 - 1, num * 0
        if num <= CHUNK:  # nearly always: the tokens are read once
            weight, _, inside = _window(base, ids, start, num, CHUNK)
            key = tl.where(inside, _key(weight), -1)
            share = inside.to(tl.int64)
            if not COUNTS:
                share = tl.where(inside, _mass(_depth(weight, top, heat)), 0)
            low = tl.minimum(low, tl.min(tl.where(inside, key, 4294967296)))
            high = tl.maximum(high, tl.max(key))
            while low < high:
                middle = low + (high - low + 1) // 2
                reached = above + tl.sum(tl.where(key >= middle, share, 0)) >= need
                low = tl.where(reached, middle, low)
                high = tl.where(reached, high, middle - 1)
        else:
            while start < num:
                weight, _, inside = _window(base, ids, start, num, CHUNK)
                key = _key(weight)
                low = tl.minimum(low, tl.min(tl.where(inside, key, 4294967296)))
                high = tl.maximum(high, tl.max(tl.where(inside, key, -1)))
                start += CHUNK
            while low < high:
                middle = low + (high - low + 1) // 2
                if above + _down_to(base, ids, num, middle, top, heat, COUNTS, CHUNK) >= need:
                    low = middle
                else:
                    high = middle - 1
        if COUNTS:
            mass = _down_to(base, ids, num, low, top, heat, False, CHUNK)
            tl.store(top_keys + row, low)
            tl.store(total_of + row, tl.load(total_of + row) + mass)
        else:
            before = above + _down_to(base, ids, num, low + 1, top, heat, COUNTS, CHUNK)
            tied, last, start = num * 0, num * 0, num * 0
            unit, wanted = num * 0 + 1, num * 0 + 1
            while (start < num) & (tied < wanted):
                weight, token, inside = _window(base, ids, start, num, CHUNK)
                equal = inside & (_key(weight) == low)
                if tl.max(equal.to(tl.int32)) != 0:
                    unit = tl.max(tl.where(equal, _mass(_depth(weight, top, heat)), 0))
                    wanted = tl.maximum((need - before + unit - 1) // tl.maximum(unit, 1), 1)
                    rank = tied + tl.cumsum(equal.to(tl.int32), 0)
                    last = tl.maximum(last, tl.max(tl.where(equal & (rank <= wanted), token, 0)).to(tl.int64))
                    tied += tl.sum(equal.to(tl.int32))
                start += CHUNK
            tl.store(mass_keys + row, low)
            tl.store(lasts + row, last)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def cut(
    weights,
    maxima,
    factors,
    bounds,
    tops,
    top_keys,
    mass_keys,
    lasts,
    vocab_size,
    num_blocks,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """-inf for the tokens of a block that lie below any border of their row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    has_nan, top = _top(maxima, row, num_blocks, BLOCKS)
    bound, most, least = tl.load(bounds + row * 2), tl.load(tops + row), tl.load(bounds + row * 2 + 1)
    if (has_nan == 0) & ((bound < 1.0) | (most > 0) | (least != float("-inf"))):
        token = block * TOKENS + tl.arange(0, TOKENS)
        inside = token < vocab_size
        weight = tl.load(weights + row * vocab_size + token, mask=inside, other=float("-inf"))
        key = _key(weight)
        border = tl.load(mass_keys + row)
        kept = (key > border) | ((key == border) & (token <= tl.load(lasts + row)))
        kept &= key >= tl.load(top_keys + row)
        if least != float("-inf"):
            heat = tl.load(factors + row * 4).to(tl.float64)
            kept &= weight.to(tl.float64) / heat >= top.to(tl.float64) / heat + least
        tl.store(weights + row * vocab_size + token, float("-inf"), mask=inside & (kept == 0))


@triton.jit
def _top(maxima, row, num_blocks, BLOCKS: tl.constexpr):
    """Whether a row holds a NaN, and its largest weight."""
    blocks = tl.arange(0, BLOCKS)
    largest = tl.load(maxima + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    has_nan = tl.max((largest != largest).to(tl.int32))
    return has_nan, tl.max(tl.where(largest != largest, float("-inf"), largest))


@triton.jit
def _depth(weight, top, heat):
    """How many nats below the top: float64, 0 for all that ties with it, also where that is infinite."""
    heat = heat.to(tl.float64)
    return tl.where(weight == top, 0.0, top.to(tl.float64) / heat - weight.to(tl.float64) / heat)


@triton.jit
def _mass(depth):
    return (tl.exp(-depth) * 2.0**43).to(tl.int64)


@triton.jit
def _key(weight):
    """A whole number of 32 bits in the order of the weights: int64; 0 and -0 are one."""
    bits = tl.where(weight == 0.0, 0.0, weight).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def _window(base, ids, start, num, CHUNK: tl.constexpr):
    """Tokens of the window and their weights, from one on."""
    place = start + tl.arange(0, CHUNK)
    inside = place < num
    token = tl.load(ids + place, mask=inside, other=0)
    return tl.load(base + token, mask=inside, other=0.0), token, inside


@triton.jit
def _down_to(base, ids, num, least, top, heat, COUNTS: tl.constexpr, CHUNK: tl.constexpr):
    """Number, or mass, of the tokens in the window whose key is not below `least`."""
    total, start = num * 0, num * 0
    while start < num:
        weight, _, inside = _window(base, ids, start, num, CHUNK)
        here = inside & (_key(weight) >= least)
        if COUNTS:
            total += tl.sum(here.to(tl.int32)).to(tl.int64)
        else:
            total += tl.sum(tl.where(here, _mass(_depth(weight, top, heat)), 0))
        start += CHUNK
    return total
