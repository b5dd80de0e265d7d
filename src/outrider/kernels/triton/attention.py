"""Paged attention in Triton: the key axis is split at fixed positions, and what the parts say is folded in their order.

Flash decoding's split (arXiv:2311.01282) with nothing in it that depends on the pass: a *part* is `KEYS` consecutive
positions, `KEYS` fixed by the shape of the heads alone; a part gives its softmax's largest score, its total and its
values, in float32; `PARTS` parts make a *chunk*, folded one after the other, `CHUNKS` chunks likewise a *stretch*, and
stretches are folded one after the other. Who computes a part (`split.py`), how many of them a program folds before it
writes what they say, with how many rows beside it, and where its keys lie, is free.

Beside bfloat16 pages queries and weights are rounded to bfloat16, as flash attention does (arXiv:2205.14135): the keys
and values that they meet are themselves no finer. A sum of weights is a product with ones, as the order of a reduction
among threads depends on the tile and that of a product does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from outrider.kernels.base import KeyIndex
from outrider.kernels.triton.launch import launch_options, on_device
from outrider.kernels.triton.merge import merge
from outrider.kernels.triton.split import attend_parts

PARTS, CHUNKS = 4, 4
"""Parts that a chunk holds, and chunks that a stretch holds."""
MOST_NUMBERS, MOST_FLOATS = 8192, 4096
"""Numbers of keys (positions x head size) in a part of bfloat16 or of float32 pages."""
MOST_KEYS, LEAST_KEYS = 128, 16
LEAST_TILE, WIDE_TILE = 16, 64
"""Queries (rows x heads of a group) of a tensor core's product: of few, and of many rows that read the same keys."""
PROGRAMS = 512
"""Programs that fill a card, and no more are started for each kind of work: one goes through several units instead."""
FILLING = 128
"""Programs of wide tiles below which narrow ones serve, of which there are more."""
UNITS = ((PARTS * CHUNKS, 256), (PARTS, 128))
"""Parts that one program folds into one, so that less is written for the merge, if there are so many programs still."""
WORKSPACE = 64 << 20
"""Bytes for what the parts say; passes of more rows run slice by slice."""
AHEAD = 16
"""Units that the merge asks for at once."""
LOG2_E = 1.4426950408889634
STAGES = 3
"""Of the loop of a program that folds stretches: keys on their way while others are multiplied. Elsewhere two programs
or more of a multiprocessor wait for their keys in turns, for which they need its shared memory."""


@dataclass(frozen=True, slots=True)
class Split:
    """How one call is cut among programs: none of it changes a bit.

    Attributes:
        tile: queries of a program that serves several rows of a request. unit: parts that a program folds into one.
        tile_lanes, row_lanes: programs that share the units of a tile, and of a row that has keys of its own.
    """

    tile: int
    unit: int
    tile_lanes: int
    row_lanes: int


def attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    keys: KeyIndex,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor | None,
    tile: int | None = None,
    overlap: bool = False,
    unit: int | None = None,
    skip_first: bool = False,
) -> Tensor:
    """q: (T, Hq, D) float32, pages (S, Hkv, D) float32 or bfloat16 -> (T, Hq, D) float32; see `Kernels.attention`.

    Args:
        tile: queries of a tile whatever the number of rows, 16 or 64; None: the faster.
        overlap: launch as `launch.begin` says. unit: parts of a unit, one of `UNITS` or 1; None: the faster.
    """
    out = torch.empty_like(q, dtype=torch.float32) if out is None else out
    for tensor in (q, out, k_pages, v_pages):
        assert tensor.is_contiguous()
    num_rows, num_heads, dim = q.shape
    kv_heads = k_pages.shape[1]
    # NumPy's products depend on the tile, so that the interpreter has but one; and it has nothing to fill.
    is_interpreted = q.device.type == "cpu"
    part = part_keys(dim, k_pages.dtype)
    # No row is longer than what its table holds and a tail behind it.
    num_parts = triton.cdiv(keys.tables.shape[1] * keys.block_size + keys.tails.shape[1], part)
    can_be_wide = not (tile or is_interpreted or k_pages.dtype == torch.float32)
    is_wide = tile == WIDE_TILE or (can_be_wide and _fills(num_rows, num_heads // kv_heads, kv_heads * num_parts))
    sizes = num_heads // kv_heads, kv_heads, num_parts, is_wide, 1 if is_interpreted else PROGRAMS
    unit = unit or min(choose(num_rows, *sizes).unit, PARTS * CHUNKS if dim <= 128 else PARTS)
    num_units, loose = num_parts // unit, _tail_parts(keys, part) + unit - 1
    by_row = 4 * num_heads * (dim + 2) * (num_units + loose)
    step = max(WIDE_TILE, WORKSPACE // by_row // WIDE_TILE * WIDE_TILE)
    tails = _tail_parts(keys, part) if keys.tables.shape[0] == 1 else None
    split = choose(min(num_rows, step), *sizes, unit, tails)
    numbers = scale, window, softcap, sinks, skip_first
    for first in range(0, num_rows, step):
        rows, index = slice(first, first + step), keys
        if num_rows > step:
            names = ("request", "linear", "tails", "length")
            index = replace(keys, **{name: getattr(keys, name)[rows] for name in names})
        _attend_slice(q[rows], k_pages, v_pages, index, numbers, out[rows], part, num_parts, split, overlap)
    return out


def tiles_differ(device: torch.device, overlap: bool = False) -> bool:
    """Whether rows that share a tile get other bits here than by tiles of a row or two, as they never did where tried.

    The rows of one request's prompt, over keys that lie in order.
    """
    num_rows, dim, num_keys = 48, 128, 448
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, heads, dim, generator=generator) for n, heads in ((num_rows, 4), *((num_keys, 1),) * 2))
    positions = torch.arange(num_keys - num_rows, num_keys, dtype=torch.int32)
    table = torch.arange(num_keys // 16, dtype=torch.int32)[None]
    zeros, length, table = (part.to(device) for part in (torch.zeros_like(positions), positions + 1, table))
    keys = KeyIndex(table, zeros, length, zeros[:, None].contiguous(), length, 16)
    q, k, v = q.to(device), k.bfloat16().to(device), v.bfloat16().to(device)
    wide, narrow = (
        attend(q, k, v, keys, 0.1, None, None, None, None, tile, overlap) for tile in (WIDE_TILE, LEAST_TILE)
    )
    return not torch.equal(wide, narrow)


def part_keys(dim: int, dtype: torch.dtype) -> int:
    """Positions of a part: a function of the head's size and of what pages hold."""
    most = MOST_FLOATS if dtype == torch.float32 else MOST_NUMBERS
    return min(MOST_KEYS, max(LEAST_KEYS, most // _padded(dim)))


def choose(
    num_rows: int,
    group: int,
    kv_heads: int,
    num_parts: int,
    is_wide: bool,
    programs: int = PROGRAMS,
    unit: int | None = None,
    tails: int | None = None,
) -> Split:
    """The split of a call of `num_rows` rows over at most `num_parts` parts.

    Args:
        is_wide: whether many rows may share a tile of the larger size.
        programs: how many fill the machine.
        unit: what was chosen already. tails: parts that a row has for itself, where all rows are one request's.
    """
    padded = triton.next_power_of_2(group)
    tile = WIDE_TILE if is_wide else LEAST_TILE
    num_tiles = triton.cdiv(num_rows, max(1, tile // padded)) if num_rows > 1 and padded < tile else 0
    if unit is None:
        programs_a_part = max(1, num_tiles) * kv_heads
        unit = next((u for u, n in UNITS if 2 * num_parts >= u * u and programs_a_part * num_parts >= n * u), 1)
    jobs = num_parts // unit + unit - 1
    return Split(
        tile,
        unit,
        tile_lanes=min(jobs, triton.cdiv(programs, num_tiles * kv_heads)) if num_tiles else 0,
        row_lanes=min(jobs, triton.cdiv(programs, num_rows * kv_heads), (tails if tails and num_tiles else jobs)),
    )


def _fills(num_rows: int, group: int, programs: int) -> bool:
    """Whether rows fill tiles of the larger size, and those a card. programs: of each tile."""
    padded = triton.next_power_of_2(group)
    tiles = triton.cdiv(num_rows, max(1, WIDE_TILE // padded))
    return num_rows * padded > LEAST_TILE and tiles * programs >= FILLING


def _padded(dim: int) -> int:
    return max(LEAST_TILE, int(triton.next_power_of_2(dim)))


def _attend_slice(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    keys: KeyIndex,
    numbers: tuple[float, int | None, float | None, Tensor | None, bool],
    out: Tensor,
    part: int,
    num_parts: int,
    split: Split,
    overlap: bool,
) -> None:
    """Two launches, or three: what tiles share, what rows see alone, and the merge."""
    scale, window, softcap, sinks, skip_first = numbers
    num_rows, num_heads, dim = q.shape
    kv_heads = k_pages.shape[1]
    is_exact, is_interpreted, device = k_pages.dtype == torch.float32, q.device.type == "cpu", q.device
    tail_parts, num_units = _tail_parts(keys, part), num_parts // split.unit if split.unit > 1 else 0
    num_places = num_units + split.unit - 1 + tail_parts if split.unit > 1 else num_parts
    values = torch.empty(num_rows, num_heads, num_places, dim, device=device)
    stats = torch.empty(2, num_rows, num_heads, num_places, device=device)
    full = torch.empty(num_rows, dtype=torch.int32, device=device)
    group = num_heads // kv_heads
    padded_group, padded_dim = triton.next_power_of_2(group), _padded(dim)
    rows_a_tile = split.tile // padded_group if split.tile_lanes else 0
    num_tiles = triton.cdiv(num_rows, rows_a_tile) if rows_a_tile else 1
    bounds = 0 if window is None else window, num_rows, num_units, num_places
    overlapped = {"OVERLAP": overlap, **launch_options(overlap)}
    is_long, is_large = split.unit > PARTS, k_pages.numel() >= 1 << 31
    with on_device(device):
        for is_tile in (True, False) if rows_a_tile else (False,):
            lanes = split.tile_lanes if is_tile else split.row_lanes
            attend_parts[(kv_heads, lanes * (num_tiles if is_tile else num_rows))](
                *(q, k_pages, v_pages, values, stats, full),
                *(keys.tables, keys.request, keys.linear, keys.tails, keys.length),
                *(keys.tables.stride(0), keys.tails.stride(0), *bounds, tail_parts, num_tiles, lanes),
                scale if softcap is not None else scale * LOG2_E,
                1.0 if softcap is None else softcap,
                SHAPE=(keys.block_size, kv_heads, group, padded_group, dim, padded_dim, part, split.unit, PARTS),
                ROWS=rows_a_tile,
                TILE=split.tile if is_tile else max(LEAST_TILE, padded_group),
                FLAGS=(
                    window is not None,
                    softcap is not None,
                    is_exact,
                    is_interpreted,
                    is_large,
                    is_tile,
                    skip_first,
                ),
                STAGES=STAGES if is_long else 1,
                num_warps=8 if is_tile and (is_long or (split.unit > 1 and padded_dim > 128)) else 4,
                maxnreg=_registers(is_tile, is_exact, split, padded_dim),
                **overlapped,
            )
        merge[(num_rows, num_heads)](
            *(values, stats, full, keys.length, q if sinks is None else sinks, out, *bounds),
            SHAPE=(num_heads, dim, padded_dim, part, split.unit, PARTS, PARTS * CHUNKS),
            AHEAD=1 if is_interpreted else max(1, AHEAD * split.unit // (PARTS * CHUNKS)),
            HAS_WINDOW=window is not None,
            HAS_SINKS=sinks is not None,
            num_warps=max(1, padded_dim // 128),
            **overlapped,
        )


def _registers(is_tile: bool, is_exact: bool, split: Split, padded_dim: int) -> int | None:
    """Most registers of a thread, where the compiler takes more than it needs: four programs of a part fit one
    multiprocessor then. None leaves it to the compiler, as units of a tile are few programs that keep much."""
    fits = not is_exact and padded_dim <= 128 and split.unit <= (1 if is_tile else PARTS)
    return 128 if fits else None


def _tail_parts(keys: KeyIndex, part: int) -> int:
    """The most parts that hold a key of one tail."""
    return triton.cdiv(keys.tails.shape[1], part) + 1
