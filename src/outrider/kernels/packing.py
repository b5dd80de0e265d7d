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
