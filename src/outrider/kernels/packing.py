"""Weights in the order in which the native linears read them (kernels/cpu/linear.h): tiles of 16 outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.errors import KernelError

GROUP = 32
"""Quantised weights that share a scale."""
TILE = 16
"""Outputs that are computed side by side."""


def pack_floats(weight: Tensor) -> Tensor:
    """(N, K) float32 or bfloat16 -> (N / 16, K, 16), N filled up with zeros."""
    return _tiles(weight).transpose(1, 2).contiguous()


def pack_q4(quants: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """(N, K) uint8 in 0..15, (N, K / 32) twice -> (N / 16, K / 32, 320) uint8.

    A group of 32 is 4 times 64 bytes, byte 4 i + j of the b-th holding weights 4 b + j (low nibble) and 16 + 4 b + j
    (high) of output i; then 16 scales and 16 minima in half precision.
    """
    tiles = _tiles(quants)
    num_tiles, _, k = tiles.shape
    # (tile, output, group, half, quad, byte) -> (tile, group, half, quad, output, byte)
    ordered = tiles.view(num_tiles, TILE, k // GROUP, 2, 4, 4).permute(0, 2, 3, 4, 1, 5)
    nibbles = (ordered[:, :, 0] | ordered[:, :, 1] << 4).reshape(num_tiles, k // GROUP, 256)
    return torch.cat([nibbles, _halves(scales, "scale"), _halves(minima, "minimum")], dim=2)


def pack_q8(quants: Tensor, scales: Tensor) -> Tensor:
    """(N, K) int8, (N, K / 32) -> (N / 16, bytes) uint8: all quants + 128 (group, quad, output, byte), all scales.

    A tile is filled up to a multiple of 64 bytes, so that loads never straddle two cache lines.
    """
    tiles = _tiles(quants)
    num_tiles, _, k = tiles.shape
    ordered = tiles.view(num_tiles, TILE, k // GROUP, 8, 4).permute(0, 2, 3, 1, 4).reshape(num_tiles, -1)
    shifted = (ordered.to(torch.int16) + 128).to(torch.uint8)
    packed = torch.cat([shifted, _halves(scales, "scale").flatten(1)], dim=1)
    return nn.functional.pad(packed, (0, -packed.shape[1] % 64)).contiguous()


def pack_rows(kind: str, packed: Tensor, in_features: int, ids: Tensor) -> Tensor:
    """The rows `ids` (n,) int64 of packed weights as packed weights of their own, bit for bit."""
    tile, lane = ids // TILE, ids % TILE
    if kind not in ("q4", "q8"):
        return pack_floats(packed[tile, :, lane])
    groups = in_features // GROUP
    quads = 8 if kind == "q8" else 4
    if kind == "q8":
        quants = packed[:, : groups * GROUP * TILE].view(-1, groups, quads, TILE, 4)
        halves = packed[:, groups * GROUP * TILE :][:, : groups * 2 * TILE].reshape(-1, groups, 1, TILE, 2)
    else:
        quants = packed[:, :, : TILE * GROUP // 2].unflatten(2, (quads, TILE, 4))
        halves = packed[:, :, TILE * GROUP // 2 :].unflatten(2, (2, TILE, 2))
    # Indexing with a slice in between puts the chosen rows first: (n, group, quad or number, byte).
    chosen = [_tiles(part[tile, :, :, lane].flatten(1)) for part in (quants, halves)]
    rows, numbers = (
        part.view(-1, TILE, groups, inner, width).permute(0, 2, 3, 1, 4).flatten(2)
        for part, inner, width in zip(chosen, (quads, halves.shape[2]), (4, 2), strict=True)
    )
    if kind == "q4":
        return torch.cat([rows, numbers], dim=2).contiguous()
    whole = torch.cat([rows.flatten(1), numbers.flatten(1)], dim=1)
    return nn.functional.pad(whole, (0, -whole.shape[1] % 64)).contiguous()


def quantise(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round weights (N, K) to the nearest of a kind, in groups of 32: what `Kernels.pack_quantised` takes.

    kind: "q8" (scale = largest / 127) or "q4" (16 steps from the least to the largest). Scales and minima are halves.

    Raises:
        KernelError: if K is no multiple of 32.
    """
    if weight.shape[1] % GROUP:
        raise KernelError(f"rows of {weight.shape[1]} are not whole groups of 32: keep them in bfloat16")
    groups = weight.float().unflatten(1, (-1, GROUP))
    if kind == "q8":
        scales = (groups.abs().amax(dim=2) / 127).half().float()
        quants = (groups / scales.clamp(min=1e-8).unsqueeze(2)).round().clamp(-127, 127)
        return quants.flatten(1).to(torch.int8), scales, None
    minima = groups.amin(dim=2).half().float()
    scales = ((groups.amax(dim=2) - minima) / 15).half().float()
    quants = ((groups - minima.unsqueeze(2)) / scales.clamp(min=1e-8).unsqueeze(2)).round().clamp(0, 15)
    return quants.flatten(1).to(torch.uint8), scales, minima


def quantise_outputs(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights (N, K) to int8 with one scale an output, largest / 127: (N, K) int8 and (N,) float32.

    What `Kernels.pack_quantised` takes as "int8".
    """
    rows = weight.float()
    scales = rows.abs().amax(dim=1) / 127
    return (rows / scales.clamp(min=1e-30).unsqueeze(1)).round().to(torch.int8), scales


def _tiles(rows: Tensor) -> Tensor:
    filled = nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % TILE))
    return filled.view(-1, TILE, rows.shape[1])


def _halves(numbers: Tensor, name: str) -> Tensor:
    """(N, G) float32 -> (N / 16, G, 32) uint8, the bytes of 16 halves a group.

    Raises:
        KernelError: if a number is no finite half.
    """
    halves = numbers.to(torch.float16)
    if not torch.equal(halves.float(), numbers.float()) or not halves.isfinite().all():
        raise KernelError(
            f"a {name} of a quantised weight is no half-precision number: choose dtype float32 or bfloat16"
        )
    return _tiles(halves).transpose(1, 2).contiguous().view(torch.uint8)
