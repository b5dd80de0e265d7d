"""Row-invariant linears in Triton: packed weights times a few rows, or many, by one loop over the inputs in order.

A program computes a tile of outputs x rows. The weights are the first operand of the tensor cores' product whatever
the number of rows, the inputs are taken in rising order, and no sum is split among programs: a row's sum is one fixed
sequence. (On an H200 its bits did not depend on the size of the tile either; `differing_tiles` tries that where it
runs.) A pass of few rows only streams its weights, so that the order costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.kernels.packing import GROUP
from outrider.kernels.triton.head import draw_rows
from outrider.kernels.triton.launch import UNFUSED, launch_options, on_device
from outrider.kernels.triton.multiply import multiply
from outrider.kernels.triton.rows import lookup_rows

DRAWN_NUMBERS = 2048
"""Logits of a tile that are drawn from by twice as many warps, as noise takes registers, too."""
MOST_DRAWN = 128
"""Rows by which the tile of a draw is chosen at most: noise finds no registers beside a larger one."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A program's share of the work: `outputs` x `rows`, `inputs` at a time, `stages` of them on their way.

    Attributes:
        ahead: bytes of weights that a program asks for before its inputs are there. late: the next kernel is set up
            when the sums are there, not at once; see `products`.
    """

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int
    ahead: int = 32768
    late: bool = True


ANY = 1 << 62
TILES: tuple[tuple[int, tuple[tuple[int, int, Tile], ...]], ...] = (
    (
        16,
        (
            (2048, ANY, Tile(16, 16, 256, 4, 4, late=False)),
            (4096, 4096, Tile(64, 16, 256, 4, 5)),
            (8192, ANY, Tile(64, 16, 128, 4, 9)),
            (65536, ANY, Tile(64, 16, 128, 4, 5)),
            (ANY, ANY, Tile(128, 16, 128, 4, 3)),
        ),
    ),
    (
        32,
        (
            (2048, ANY, Tile(16, 32, 256, 4, 4, late=False)),
            (4096, 4096, Tile(64, 32, 128, 4, 5)),
            (4096, ANY, Tile(64, 32, 256, 4, 3)),
            (8192, ANY, Tile(64, 32, 64, 4, 9)),
            (ANY, ANY, Tile(64, 32, 128, 4, 4)),
        ),
    ),
    (
        64,
        (
            (2048, ANY, Tile(16, 64, 128, 4, 4, late=False)),
            (4096, 4096, Tile(64, 64, 128, 8, 5)),
            (4096, ANY, Tile(64, 64, 64, 4, 9)),
            (8192, ANY, Tile(64, 64, 128, 4, 4)),
            (65536, ANY, Tile(128, 64, 64, 4, 5)),
            (ANY, ANY, Tile(128, 64, 64, 4, 4)),
        ),
    ),
    (128, ((4096, ANY, Tile(64, 64, 128, 4, 4)), (ANY, ANY, Tile(64, 128, 128, 4, 4)))),
    (512, ((4096, ANY, Tile(64, 128, 128, 4, 3)), (ANY, ANY, Tile(128, 128, 64, 8, 4)))),
    (ANY, ((ANY, ANY, Tile(128, 128, 64, 8, 4)),)),
)
"""By most rows of a call, then the first that has no fewer outputs and inputs. A table, not a search at run time: what
runs must not depend on what was measured on the way; `measure/tune` measures for those who write it."""
ONE_TILE = Tile(64, 64, 128, 4, 4)
"""For every call on a device where tiles differ in their bits."""
FLOAT_TILE = Tile(32, 32, 32, 4, 3)
"""Of float32 weights, which no tensor core multiplies exactly, for any number of rows."""
MOST_OF_EIGHT_BITS = 32
"""Outputs of a tile of 8-bit weights. A Hopper GPU multiplies 64 and more by other instructions, in
front of which the inputs of weights that are converted on their way stand in another order."""
PLAIN_TILE = Tile(64, 16, 128, 4, 1)
"""The interpreter's on a CPU: it multiplies by NumPy, whose sums do depend on the size of a tile."""


def choose(num_rows: int, num_outputs: int, num_inputs: int, has_eight_bits: bool = False) -> Tile:
    """The tile of a call on a GPU."""
    by_shape = next(tiles for most, tiles in TILES if num_rows <= most)
    tile = next(tile for outputs, inputs, tile in by_shape if num_outputs <= outputs and num_inputs <= inputs)
    if has_eight_bits:
        return replace(tile, outputs=min(tile.outputs, MOST_OF_EIGHT_BITS), warps=4)
    return tile


def all_tiles() -> list[Tile]:
    """Every tile of the table, each once."""
    return list(dict.fromkeys(tile for _, tiles in TILES for _, _, tile in tiles))


class TritonLinear:
    """Weights (N, K) row by row; see `Linear`. Inputs are rounded to bfloat16 where the weights are no float32.

    Attributes:
        input_dtype: what inputs are rounded to. tile: the one that serves any number of rows (of weights that
            are no float32), or None.
    """

    def __init__(
        self,
        kind: str,
        weight: Tensor,
        scales: Tensor | None = None,
        bias: Tensor | None = None,
        tile: Tile | None = None,
        overlap: bool = False,
    ) -> None:
        """weight: (N, K) float32, bfloat16, or int8 with scales (N, K // 32), or (N,) of the kind "int8"."""
        self.kind = kind
        self.out_features, self.in_features = weight.shape
        self.weight = weight.contiguous()
        self.scales = None if scales is None else scales.contiguous()
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.nbytes = sum(t.nbytes for t in (self.weight, self.scales, self.bias) if t is not None)
        self.input_dtype = torch.float32 if kind == "float32" else torch.bfloat16
        self.tile = tile
        self._overlap = overlap

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x: (T, K) float32, or rounded already -> (T, N) float32; `residual` (T, N) is added last."""
        num_rows = x.shape[0]
        out = torch.empty(num_rows, self.out_features, device=x.device) if out is None else out
        if num_rows:
            self.run(x.to(self.input_dtype), residual, out, self._choose(num_rows, x.device))
        return out

    def gated(self, x: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
        """See `GatedLinear.gated`: the product itself is never written."""
        num_rows = x.shape[0]
        out = torch.empty(num_rows, self.out_features // 2, device=x.device) if out is None else out
        if num_rows:
            self.run(x.to(self.input_dtype), None, out, self._choose(num_rows, x.device), activation)
        return out

    def run(self, x: Tensor, residual: Tensor | None, out: Tensor, tile: Tile, activation: str | None = None) -> None:
        """One launch with this tile: x (T, K) of `input_dtype`, T >= 1; with an activation `out` is (T, N / 2)."""
        assert x.stride(1) == 1 or self.in_features == 1
        assert out.stride(1) == 1 or out.shape[1] == 1
        assert residual is None or residual.stride(1) == 1 or self.out_features == 1
        grid = (triton.cdiv(x.shape[0], tile.rows), triton.cdiv(self.out_features, tile.outputs))
        with on_device(x.device):
            multiply[grid](
                *self._operands(x),
                out if residual is None else residual,
                out,
                x.shape[0],
                self.out_features,
                x.stride(0),
                out.stride(0) if residual is None else residual.stride(0),
                out.stride(0),
                self._bytes_ahead(tile),
                HAS_RESIDUAL=residual is not None,
                IS_GATED=activation is not None,
                IS_GELU=activation == "gelu_tanh",
                **self._options(tile, x.device),
                **UNFUSED,
            )

    def draw(
        self,
        x: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        samples: Tensor,
        positions: Tensor,
        vocab_size: int | None = None,
    ) -> Tensor:
        """See `Linear.draw`: the product itself is never written."""
        size = min(vocab_size or self.out_features, self.out_features)
        if not x.shape[0]:
            return torch.empty(0, dtype=torch.int64, device=x.device)
        tile, x = self._choose(min(x.shape[0], MOST_DRAWN), x.device), x.to(self.input_dtype)
        if tile.outputs * tile.rows >= DRAWN_NUMBERS:
            tile = replace(tile, warps=8)
        keyed, options = (temperature, seeds, samples, positions), self._options(tile, x.device)
        sizes = tile.rows, tile.outputs, self._bytes_ahead(tile)
        return draw_rows(self._operands(x), keyed, size, sizes, options)

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs, weights, scales and bias; what there is none of is not read."""
        return (
            x,
            self.weight,
            self.weight if self.scales is None else self.scales,
            self.weight if self.bias is None else self.bias,
        )

    def _options(self, tile: Tile, device: torch.device) -> dict[str, Any]:
        """What `multiply.products` is told, and how it is launched."""
        by_group = self.scales is not None and self.scales.dim() == 2
        is_plain = device.type == "cpu"
        return {
            "SHAPE": (self.in_features, tile.outputs, tile.rows, tile.inputs, GROUP if by_group else 0),
            "FLAGS": (self.bias is not None, self.kind == "int8", self.kind == "float32", is_plain),
            "IS_LATE": tile.late,
            "OVERLAP": self._overlap,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            **launch_options(self._overlap),
        }

    def _bytes_ahead(self, tile: Tile) -> int:
        return min(tile.ahead // tile.outputs, self.in_features * self.weight.itemsize)

    def _choose(self, num_rows: int, device: torch.device) -> Tile:
        if device.type == "cpu":
            return PLAIN_TILE
        if self.kind == "float32":
            return FLOAT_TILE
        return self.tile or choose(num_rows, self.out_features, self.in_features, self.scales is not None)

    def lookup(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """tokens: (T,) int64 -> rows of w, dequantised exactly: (T, K) float32."""
        return lookup_rows(self.weight, self.scales, tokens, out, self._overlap)

    def rows(self, ids: Tensor) -> TritonLinear:
        """A linear of the outputs `ids` (n,) int64 alone, with the very bits of their weights."""
        scales, bias = (None if t is None else t[ids] for t in (self.scales, self.bias))
        return TritonLinear(self.kind, self.weight[ids], scales, bias, self.tile, self._overlap)


def differing_tiles(device: torch.device, overlap: bool = False, num_inputs: int = 1024) -> list[Tile]:
    """The tiles of the table whose results differ in any bit from the first one's; none, where each may serve."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, num_inputs, generator=generator).bfloat16().to(device) for n in (272, 80))
    linear = TritonLinear("bfloat16", weight, overlap=overlap)
    expected = None
    differing = []
    for tile in all_tiles():
        found = torch.empty(80, 272, device=device)
        linear.run(x, None, found, tile)
        expected = found if expected is None else expected
        if not torch.equal(found, expected):
            differing.append(tile)
    return differing
