"""The two kernels of split attention: what parts of the key axis say, and their merge.

Scores are kept in units of log 2 (by the factor log2 e), so that weights are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.triton.launch import begin

# A number that happens to be 1 or a multiple of 16, or an array that happens to start on a line, must not choose
# another program for the same row (nor have another one compiled while somebody waits).
_NUMBERS = [
    "table_stride",
    "tail_stride",
    "window",
    "num_rows",
    "num_units",
    "tile_programs",
    "tile_lanes",
    "row_lanes",
]
_ARRAYS = ["tables", "request", "linear", "tails", "length"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def attend_parts(
    q,
    k_pages,
    v_pages,
    values,
    stats,
    tables,
    request,
    linear,
    tails,
    length,
    table_stride,
    tail_stride,
    window,
    num_rows,
    num_units,
    tile_programs,
    tile_lanes,
    row_lanes,
    scale,
    softcap,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    FLAGS: tl.constexpr,
    HAS_TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Units of parts: by a tile of rows that find a unit's keys in one table, else by each row.

    values: (T, Hq, units, D), stats: (2, T, Hq, units) float32: the largest score and the total of the weights; both
    are written where a row sees a key of the unit, and may be elsewhere.

    SHAPE: slots a block, Hkv, heads of a group, the same as a power of two, D, the same as a power of two, keys of a
    part, parts of a unit. TILE, ROW_TILE: queries of a product. FLAGS: whether there is a window, is a cap, are pages
    float32, is this the interpreter.
    """
    begin(OVERLAP)
    WIDTH: tl.constexpr = SHAPE[6] * SHAPE[7]
    HAS_WINDOW: tl.constexpr = FLAGS[0]
    arrays = (q, k_pages, v_pages, values, stats, request, linear, length)
    numbers = (window, num_rows, num_units, scale, softcap)
    program, num_shared = tl.program_id(0), tile_programs * 0
    if HAS_TILES:
        ROWS: tl.constexpr = TILE // SHAPE[3]
        is_tile = program < tile_programs
        tile = tl.where(is_tile, program // tile_lanes, (program - tile_programs) // row_lanes // ROWS)
        rows = tile * ROWS + tl.arange(0, ROWS)
        owner = tl.load(request + tile * ROWS)
        known = tl.load(linear + rows, mask=rows < num_rows, other=0)
        # A row without keys in the table (one that only fills the pass) is alone, as strangers are.
        is_member = (known > 0) & (tl.load(request + rows, mask=rows < num_rows, other=0) == owner)
        lengths = tl.load(length + rows, mask=is_member, other=0)
        num_shared = tl.min(tl.where(is_member & (known < lengths), known, 2147483647)) // WIDTH
        if is_tile:
            longest = tl.max(lengths)
            unit = program % tile_lanes
            if HAS_WINDOW:
                unit += tl.maximum(tl.min(tl.where(is_member, lengths, 2147483647)) - window, 0) // WIDTH
            last = tl.minimum(num_shared, (longest + WIDTH - 1) // WIDTH)
            span = (tile * ROWS, tl.minimum(num_rows - tile * ROWS, ROWS), longest)
            path = (tables + owner.to(tl.int64) * table_stride, tails, longest)
            while unit < last:
                _attend_unit(arrays, numbers, path, span, owner, unit, SHAPE, TILE, FLAGS, True)
                unit += tile_lanes
    if program >= tile_programs:
        row = (program - tile_programs) // row_lanes
        num_keys, num_linear, own = tl.load(length + row), tl.load(linear + row), tl.load(request + row)
        unit = num_shared
        if HAS_TILES:
            unit = tl.where((num_linear > 0) & (own == owner), num_shared, 0)
        if HAS_WINDOW:
            unit = tl.maximum(unit, tl.maximum(num_keys - window, 0) // WIDTH)
        unit += (program - tile_programs) % row_lanes
        path = (tables + own.to(tl.int64) * table_stride, tails + row.to(tl.int64) * tail_stride, num_linear)
        span = (row, row * 0 + 1, num_keys)
        while unit < (num_keys + WIDTH - 1) // WIDTH:
            _attend_unit(arrays, numbers, path, span, own, unit, SHAPE, ROW_TILE, FLAGS, False)
            unit += row_lanes


@triton.jit
def _attend_unit(
    arrays,
    numbers,
    path,
    span,
    owner,
    unit,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    FLAGS: tl.constexpr,
    IS_SHARED: tl.constexpr,
):
    """One unit of the rows of `span`: the first, how many, and the most keys that one of them sees.

    path: the table, the tail, and how many of the keys lie in the table. IS_SHARED: leave out rows of other requests
    than `owner`, and those without keys in a table.
    """
    BLOCK_SIZE: tl.constexpr = SHAPE[0]
    KV_HEADS: tl.constexpr = SHAPE[1]
    GROUP: tl.constexpr = SHAPE[2]
    GROUP_PADDED: tl.constexpr = SHAPE[3]
    DIM: tl.constexpr = SHAPE[4]
    DIM_PADDED: tl.constexpr = SHAPE[5]
    KEYS: tl.constexpr = SHAPE[6]
    UNIT: tl.constexpr = SHAPE[7]
    q, k_pages, v_pages, values, stats, request, linear, length = arrays
    window, num_rows, num_units, scale, softcap = numbers
    first_row, num_here, num_keys = span
    kv_head = tl.program_id(1)
    m, d = tl.arange(0, TILE), tl.arange(0, DIM_PADDED)
    row = (first_row + m // GROUP_PADDED).to(tl.int64)
    is_query = (m // GROUP_PADDED < num_here) & (m % GROUP_PADDED < GROUP)
    if IS_SHARED:
        is_query = is_query & (tl.load(request + row, mask=is_query, other=0) == owner)
        is_query = is_query & (tl.load(linear + row, mask=is_query, other=0) > 0)
    head = (row * KV_HEADS + kv_head) * GROUP + m % GROUP_PADDED
    is_number = is_query[:, None] & (d < DIM)[None, :]
    query = tl.load(q + head[:, None] * DIM + d[None, :], mask=is_number, other=0.0)
    query = query * (scale if FLAGS[1] else scale * 1.4426950408889634)
    lengths = tl.load(length + row, mask=is_query, other=0)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    mixed = tl.zeros((TILE, DIM_PADDED), tl.float32)
    for part in range(UNIT):
        x = (unit * UNIT + part) * KEYS + tl.arange(0, KEYS)
        at = (_slots(path, x, num_keys, BLOCK_SIZE) * KV_HEADS + kv_head) * DIM
        is_key = x < num_keys
        k = tl.load(k_pages + at[None, :] + d[:, None], mask=is_key[None, :] & (d < DIM)[:, None], other=0.0)
        v = tl.load(v_pages + at[:, None] + d[None, :], mask=is_key[:, None] & (d < DIM)[None, :], other=0.0)
        scores = _product(query, k, FLAGS)
        if FLAGS[1]:  # tanh(s) = 2 sigmoid(2 s) - 1
            scores = (softcap * 1.4426950408889634) * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        seen = x[None, :] < lengths[:, None]
        if FLAGS[0]:
            seen = seen & (x[None, :] >= lengths[:, None] - window)
        largest, summed, here = _mix(tl.where(seen, scores, float("-inf")), v, FLAGS)
        if UNIT == 1:
            top, total, mixed = largest, summed, here
        else:
            top, shrink, grow = _weigh(top, largest)
            total = tl.fma(total, shrink, summed * grow)
            mixed = tl.fma(mixed, shrink[:, None], here * grow[:, None])
    place = head * num_units + unit
    tl.store(stats + place, top, mask=is_query)
    tl.store(stats + num_rows.to(tl.int64) * KV_HEADS * GROUP * num_units + place, total, mask=is_query)
    tl.store(values + place[:, None] * DIM + d[None, :], mixed, mask=is_number)


@triton.jit
def _slots(path, x, num_keys, BLOCK_SIZE: tl.constexpr):
    """Where the keys at positions x lie, int64; anywhere from `num_keys` on."""
    table, tail, num_linear = path
    in_table = x < num_linear
    block = tl.load(table + x // BLOCK_SIZE, mask=in_table & (x < num_keys), other=0)
    own = tl.load(tail + (x - num_linear), mask=(x >= num_linear) & (x < num_keys), other=0)
    return tl.where(in_table, block * BLOCK_SIZE + x % BLOCK_SIZE, own).to(tl.int64)


@triton.jit
def _mix(scores, v, FLAGS: tl.constexpr):
    """Of one part: the largest score (M,), the total of the weights (M,), and the values by weight (M, D)."""
    largest = tl.max(scores, axis=1)
    weights = tl.exp2(scores - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    ones = tl.full((scores.shape[1], 16), 1.0, tl.float32).to(v.dtype)
    return largest, tl.max(_product(weights, ones, FLAGS), axis=1), _product(weights, v, FLAGS)


@triton.jit
def _product(a, b, FLAGS: tl.constexpr):
    """a (M, K) float32 times b (K, N), summed over K in order: float32 as it is, or a as two terms of bfloat16."""
    if FLAGS[2]:
        product = tl.dot(a, b, input_precision="ieee")
    else:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        if FLAGS[3]:  # it multiplies the bits of bfloat16 as if they were integers
            high, low, b = high.to(tl.float32), low.to(tl.float32), b.to(tl.float32)
        product = tl.dot(high, b, tl.dot(low, b))
    return product


@triton.jit
def _weigh(top, largest):
    """The larger of two largest scores, and by what the sums that belong to each are multiplied; -inf is nothing."""
    larger = tl.maximum(top, largest)
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    return larger, tl.exp2(top - safe), tl.exp2(largest - safe)


@triton.jit(do_not_specialize=["window", "num_rows", "num_units"], do_not_specialize_on_alignment=["length"])
def merge(
    values,
    stats,
    length,
    sinks,
    out,
    window,
    num_rows,
    num_units,
    SHAPE: tl.constexpr,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the units of one row and key-value head: `PARTS` of them make a chunk (one, where they are chunks)."""
    begin(OVERLAP)
    GROUP: tl.constexpr = SHAPE[2]
    GROUP_PADDED: tl.constexpr = SHAPE[3]
    DIM: tl.constexpr = SHAPE[4]
    DIM_PADDED: tl.constexpr = SHAPE[5]
    WIDTH: tl.constexpr = SHAPE[6] * SHAPE[7]
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED)
    is_head = g < GROUP
    is_value = is_head[:, None] & (d < DIM)[None, :]
    head = (row * SHAPE[1] + kv_head) * GROUP + g
    totals = stats + num_rows.to(tl.int64) * SHAPE[1] * GROUP * num_units
    num_keys = tl.load(length + row)
    first, last = num_keys * 0, (num_keys + WIDTH - 1) // WIDTH
    if HAS_WINDOW:
        first = tl.maximum(num_keys - window, 0) // WIDTH
    nothing = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    top, total = nothing, tl.zeros((GROUP_PADDED,), tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + kv_head * GROUP + g, mask=is_head, other=0.0) * 1.4426950408889634
        total += 1.0
    mixed = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
    chunk = first // PARTS
    while chunk * PARTS < last:
        for ahead in tl.static_range(AHEAD):  # without a branch, so that all of them are asked for at once
            chunk_top, chunk_total, chunk_mixed = nothing, tl.zeros_like(nothing), tl.zeros_like(mixed)
            for part in tl.static_range(PARTS):
                unit = (chunk + ahead) * PARTS + part
                is_unit = (unit >= first) & (unit < last)
                place = head * num_units + unit
                unit_top = tl.load(stats + place, mask=is_head & is_unit, other=float("-inf"))
                unit_total = tl.load(totals + place, mask=is_head & is_unit, other=0.0)
                here = tl.load(values + place[:, None] * DIM + d[None, :], mask=is_value & is_unit, other=0.0)
                chunk_top, shrink, grow = _weigh(chunk_top, unit_top)
                chunk_total = tl.fma(chunk_total, shrink, unit_total * grow)
                chunk_mixed = tl.fma(chunk_mixed, shrink[:, None], here * grow[:, None])
            top, shrink, grow = _weigh(top, chunk_top)
            total = tl.fma(total, shrink, chunk_total * grow)
            mixed = tl.fma(mixed, shrink[:, None], chunk_mixed * grow[:, None])
        chunk += AHEAD
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + head[:, None] * DIM + d[None, :], mixed / total[:, None], mask=is_value)
