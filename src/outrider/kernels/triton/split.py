"""The kernel of split attention's first half: what parts of the key axis, and units of parts, say to each row."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.triton.launch import release, wait
from outrider.kernels.triton.part import attend_part, fold, nothing

# A number that happens to be 1 or a multiple of 16, or an array that happens to start on a line, must not choose
# another program for the same row (nor have another one compiled while somebody waits).
_NUMBERS = [
    "table_stride",
    "tail_stride",
    "window",
    "num_rows",
    "num_units",
    "num_places",
    "tail_parts",
    "num_tiles",
    "lanes",
]
_ARRAYS = ["tables", "request", "linear", "tails", "length"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def attend_parts(
    q,
    k_pages,
    v_pages,
    values,
    stats,
    full,
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
    num_places,
    tail_parts,
    num_tiles,
    lanes,
    scale,
    softcap,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    FLAGS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Parts and units of parts, by tiles of rows where they find keys in one table, or else by each row.

    Where keys are was said long before the kernel that this one follows, which lets it go only once it has waited
    itself: so that is read at once. Two launches are one verb where rows share tiles: the second one reads what was
    there before the first, so that it may run beside it, and ends when that one has.

    values: (T, Hq, places, D), stats: (2, T, Hq, places) float32: the largest score and the total of the weights. The
    first `num_units` places are units, the others single parts behind a row's last unit (of single parts alone each
    has the place of its number); written where a row sees a key. full: (T,) int32, the units of each row.

    SHAPE: slots a block, Hkv, heads of a group, the same as a power of two, D, the same as a power of two, keys of a
    part, parts of a unit, parts of a chunk. ROWS: of a tile, 0 where there are none. TILE: queries of a product.
    FLAGS: whether there is a window, is a cap, are pages float32, is this the interpreter, have pages 2 ** 31 numbers
    and more, are these the tiles, is position 0 seen by itself alone. tail_parts: the most that hold a key of a tail.
    num_tiles: 1 where there are none.
    """
    release(OVERLAP and not FLAGS[5])
    WAITS: tl.constexpr = OVERLAP and (FLAGS[5] or ROWS == 0)
    arrays, index = (q, k_pages, v_pages, values, stats), (request, linear, length)
    sizes, numbers = (num_rows, num_units, num_places, tail_parts), (window, scale, softcap)
    if FLAGS[5]:
        tile, lane = tl.program_id(1) % num_tiles, tl.program_id(1) // num_tiles
        _attend_tile(
            arrays,
            index,
            sizes,
            numbers,
            tables,
            table_stride,
            tile * ROWS,
            lane,
            lanes,
            SHAPE,
            ROWS,
            TILE,
            FLAGS,
            STAGES,
            WAITS,
        )
    else:
        row, lane = tl.program_id(1) % num_rows, tl.program_id(1) // num_rows
        paths = (tables, table_stride, tails, tail_stride, full)
        _attend_row(arrays, index, sizes, numbers, paths, row, lane, lanes, SHAPE, ROWS, TILE, FLAGS, STAGES, WAITS)
        if ROWS > 0:
            wait(OVERLAP)


@triton.jit
def _attend_tile(
    arrays,
    index,
    sizes,
    numbers,
    tables,
    table_stride,
    first_row,
    lane,
    lanes,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    FLAGS: tl.constexpr,
    STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):
    """What a tile's rows find in their common table."""
    UNIT: tl.constexpr = SHAPE[7]
    owner, shared, least, longest = _common(index, first_row, sizes[0], ROWS, SHAPE[6])
    first = tl.maximum(least - numbers[0], 0) // SHAPE[6] if FLAGS[0] else shared * 0
    path = (tables + owner.to(tl.int64) * table_stride, tables, longest, longest)
    span = (first_row, tl.minimum(sizes[0] - first_row, ROWS), owner, shared + sizes[3])
    units = (first // UNIT, shared // UNIT, tl.maximum(shared // UNIT * UNIT, first), shared, shared // UNIT)
    _attend(arrays, index, sizes, numbers, path, span, units, lane, lanes, SHAPE, TILE, FLAGS, STAGES, WAITS)


@triton.jit
def _attend_row(
    arrays,
    index,
    sizes,
    numbers,
    paths,
    row,
    lane,
    lanes,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    FLAGS: tl.constexpr,
    STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):
    """What a row sees that no tile shows it: its tail, or everything."""
    UNIT: tl.constexpr = SHAPE[7]
    tables, table_stride, tails, tail_stride, full = paths
    request, linear, length = index
    num_keys, known, own = tl.load(length + row), tl.load(linear + row), tl.load(request + row)
    last = (num_keys + SHAPE[6] - 1) // SHAPE[6]
    first = tl.maximum(num_keys - numbers[0], 0) // SHAPE[6] if FLAGS[0] else last * 0
    in_table = tl.where(known < num_keys, known // SHAPE[6], last)
    unit, loose = first // UNIT, tl.maximum(in_table // UNIT * UNIT, first)
    if ROWS > 0:
        owner, shared, _, _ = _common(index, row // ROWS * ROWS, sizes[0], ROWS, SHAPE[6])
        if (known > 0) & (own == owner) & (last <= shared + sizes[3]):
            in_table, unit, loose = shared, shared // UNIT, tl.maximum(shared, first)
    path = (tables + own.to(tl.int64) * table_stride, tails + row.to(tl.int64) * tail_stride, known, num_keys)
    units = (unit, in_table // UNIT, loose, last, in_table // UNIT)
    _attend(
        arrays,
        index,
        sizes,
        numbers,
        path,
        (row, row * 0 + 1, own, last),
        units,
        lane,
        lanes,
        SHAPE,
        TILE,
        FLAGS,
        STAGES,
        WAITS,
    )
    if (lane == 0) & (tl.program_id(0) == 0):
        tl.store(full + row, in_table // UNIT)


@triton.jit
def _common(index, first_row, num_rows, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Of a tile's rows that are of its first row's request: the request; how many parts all of them find in its table
    (or as many as the longest has); the fewest and the most keys that one of them sees.

    A row without keys in the table (one that only fills the pass) is alone, as strangers are.
    """
    request, linear, length = index
    rows = first_row + tl.arange(0, ROWS)
    owner = tl.load(request + first_row)
    known = tl.load(linear + rows, mask=rows < num_rows, other=0)
    lengths = tl.load(length + rows, mask=rows < num_rows, other=0)
    is_member = (known > 0) & (tl.load(request + rows, mask=rows < num_rows, other=0) == owner)
    longest = tl.max(tl.where(is_member, lengths, 0))
    least = tl.min(tl.where(is_member, lengths, 1 << 30))
    in_table = tl.min(tl.where(is_member & (known < lengths), known // KEYS, 1 << 30))
    return owner, tl.minimum(in_table, (longest + KEYS - 1) // KEYS), least, longest


@triton.jit
def _attend(
    arrays,
    index,
    sizes,
    numbers,
    path,
    span,
    units,
    lane,
    lanes,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    FLAGS: tl.constexpr,
    STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):
    """This lane's share of the units `units[0] .. units[1]` and of the single parts `units[2] .. units[3]`.

    path: the table, the tail, how many of the keys lie in the table, and how many there are. span: the first row, how
    many, their request, and the most parts that one of them may have to be served here. units[4]: of the whole row.
    WAITS: for the queries and for keys, once it is known where they are.
    """
    UNIT: tl.constexpr = SHAPE[7]
    PARTS: tl.constexpr = SHAPE[8]
    q, k_pages, v_pages, values, stats = arrays
    num_rows, num_units, num_places = sizes[0], sizes[1], sizes[2]
    d = tl.arange(0, SHAPE[5])
    head, is_query, lengths = _queries(index, span, SHAPE, TILE, FLAGS)
    wait(WAITS)
    release(WAITS and FLAGS[5])
    is_number = is_query[:, None]
    if SHAPE[4] != SHAPE[5]:
        is_number = is_number & (d < SHAPE[4])[None, :]
    query = tl.load(q + (head[:, None] * SHAPE[4] + d[None, :]), mask=is_number, other=0.0).to(k_pages.dtype.element_ty)
    place = head * num_places
    totals = stats + num_rows.to(tl.int64) * SHAPE[1] * SHAPE[2] * num_places
    count = tl.maximum(units[1] - units[0], 0) if UNIT > 1 else units[0] * 0
    start = units[2] if UNIT > 1 else tl.minimum(units[0], units[2])
    in_units = tl.maximum(count - lane + lanes - 1, 0) // lanes
    loose = start + lane + in_units * lanes - count
    steps = in_units * UNIT + tl.maximum(units[3] - loose + lanes - 1, 0) // lanes
    chunk = nothing(TILE, SHAPE[5])
    stretch = nothing(TILE, SHAPE[5])
    for step in tl.range(0, steps, num_stages=STAGES):
        in_unit = step < in_units * UNIT
        unit = units[0] + lane + step // UNIT * lanes
        part = tl.where(in_unit, unit * UNIT + step % UNIT, loose + (step - in_units * UNIT) * lanes)
        said = attend_part(query, k_pages, v_pages, path, part, lengths, numbers, SHAPE, FLAGS)
        is_last = (in_unit == 0) | (step % UNIT == UNIT - 1)
        at = part if UNIT == 1 else tl.where(in_unit, unit, num_units + part - units[4] * UNIT)
        if UNIT > 1:
            said = fold(chunk, said)
            chunk = (tl.where(is_last | (step % PARTS == PARTS - 1), float("-inf"), said[0]), said[1], said[2])
        if UNIT > PARTS:
            if is_last | (step % PARTS == PARTS - 1):
                stretch = fold(stretch, said)
            said = stretch
            stretch = (tl.where(is_last, float("-inf"), said[0]), said[1], said[2])
        if is_last:
            tl.store(stats + place + at, said[0], mask=is_query)
            tl.store(totals + place + at, said[1], mask=is_query)
            tl.store(values + ((place + at)[:, None] * SHAPE[4] + d[None, :]), said[2], mask=is_number)


@triton.jit
def _queries(index, span, SHAPE: tl.constexpr, TILE: tl.constexpr, FLAGS: tl.constexpr):
    """The heads of a tile's rows: their numbers among all, which of them count, and how many keys each sees."""
    request, linear, length = index
    m = tl.arange(0, TILE)
    row = span[0] + m // SHAPE[3]
    is_query = (m // SHAPE[3] < span[1]) & (m % SHAPE[3] < SHAPE[2])
    lengths = tl.load(length + row, mask=is_query, other=0)
    if FLAGS[5]:
        is_query = is_query & (tl.load(request + row, mask=is_query, other=0) == span[2])
        is_query = is_query & (tl.load(linear + row, mask=is_query, other=0) > 0)
        is_query = is_query & ((lengths + SHAPE[6] - 1) // SHAPE[6] <= span[3])
    return (row * SHAPE[1] + tl.program_id(0)) * SHAPE[2] + m % SHAPE[3], is_query, lengths
