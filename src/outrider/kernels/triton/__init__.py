"""The Triton kernels for GPUs: every verb of a pass is a program of its own, whose rows mind no neighbour."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import KernelError
from outrider.kernels.base import KeyIndex, Linear
from outrider.kernels.places import Placed, Relative, Standing
from outrider.kernels.plain import GROUP, PlainKernels
from outrider.kernels.sprouts import Fits, Frontier, Ranked, Sprouts
from outrider.kernels.tree import PageTable, Trees, Walks
from outrider.kernels.triton.attention import LEAST_TILE, attend, tiles_differ
from outrider.kernels.triton.draw import draw
from outrider.kernels.triton.launch import can_overlap
from outrider.kernels.triton.linear import ONE_TILE, Tile, TritonLinear, differing_tiles
from outrider.kernels.triton.places import place
from outrider.kernels.triton.rank import rank
from outrider.kernels.triton.rows import gate_rows, norm_rows, rotate_rows
from outrider.kernels.triton.sprouts import sprout
from outrider.kernels.triton.tree import compact, walk
from outrider.kernels.triton.warp import warp_rows
from outrider.kernels.warps import Warps

COMPARED = (33, 65, 130, 600)
"""Rows of a call that meet the tiles for wide passes; the self-test's own widths meet those for narrow ones."""


class TritonKernels(PlainKernels):
    """What a pass asks of a GPU; nothing here waits for the device, so that all of it can be captured in a graph.

    Attributes:
        fixed_width: None, as a row's arithmetic is one fixed sequence; what loads them may set it otherwise.
        tile: of all linears, or None where each call takes its fastest. queries: likewise of attention's tiles.
        overlap: kernels may be set up while their predecessor runs.
    """

    name = "triton"

    def __init__(self, device: torch.device, tile: Tile | None = None, overlap: bool | None = None) -> None:
        """overlap: None where the device can."""
        super().__init__(device)
        self.tile = tile
        self.queries: int | None = None
        self.overlap = can_overlap(device) if overlap is None else overlap
        self.wide = COMPARED if device.type == "cuda" else ()

    def keep_one_tile(self) -> str | None:
        """Where tiles differ in any bit on this device, take one of them for every call to come -> why, or None."""
        notes = []
        differing = differing_tiles(self.device, self.overlap)
        if differing:
            self.tile = ONE_TILE
            notes.append(f"linears run by one tile, slower: on this device {len(differing)} tiles differ in their bits")
        if tiles_differ(self.device, self.overlap):
            self.queries = LEAST_TILE
            notes.append("attention runs by one tile, slower: on this device tiles differ in their bits")
        return "; ".join(notes) or None

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> TritonLinear:
        """(N, K) float32 or bfloat16 -> Linear of the same kind; the weights are kept, not copied."""
        kind = str(weight.dtype).removeprefix("torch.")
        if kind not in ("float32", "bfloat16"):
            raise KernelError(f"weights of {weight.dtype} have no kernel: convert them to float32 or bfloat16")
        return TritonLinear(kind, weight.detach(), None, bias, self.tile, self.overlap)

    def pack_quantised(
        self, kind: str, quants: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None = None
    ) -> Linear:
        """See `Kernels.pack_quantised`; "q8" is dequantised to bfloat16 on its way to the product, "q4" is plain."""
        if kind == "int8":
            return TritonLinear(kind, quants, scales.float(), bias, self.tile, self.overlap)
        if kind != "q8" or quants.shape[1] % GROUP:
            return super().pack_quantised(kind, quants, scales, minima, bias)
        halves = scales.half()
        exact = halves if torch.equal(halves.float(), scales.float()) else scales.float()
        return TritonLinear(kind, quants, exact, bias, self.tile, self.overlap)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x: (T, H) float32, weight: (H,) float32 -> (T, H) float32."""
        return norm_rows(x, weight, eps, out, self.overlap)

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """gate_up: (T, 2 * I) float32, gate first -> silu(gate) * up: (T, I) float32."""
        return gate_rows(gate_up, False, out, self.overlap)

    def gelu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """As `silu_mul`, with gelu in its tanh form."""
        return gate_rows(gate_up, True, out, self.overlap)

    def rotate_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        num_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Kernels.rotate_and_write`."""
        operands = (qkv, cos, sin, positions, slots, k_pages, v_pages, num_heads, q_norm, k_norm, eps, out)
        return rotate_rows(*operands, overlap=self.overlap)

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        keys: KeyIndex,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        skip_first: bool = False,
    ) -> Tensor:
        """See `Kernels.attention`."""
        told = scale, window, softcap, sinks, out, self.queries, self.overlap
        return attend(q, k_pages, v_pages, keys, *told, skip_first=skip_first)

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """See `Kernels.draw`."""
        return draw(logits, temperature, seeds, samples, positions)

    def rank(
        self,
        logits: Tensor,
        count: int,
        temperature: Tensor,
        seeds: Tensor,
        samples: Tensor,
        positions: Tensor,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernels.rank`."""
        return rank(logits, count, temperature, seeds, samples, positions, ids)

    def warp(self, logits: Tensor, warps: Warps) -> Tensor:
        """See `WarpsRows.warp`."""
        return warp_rows(logits, warps)

    def place(self, standing: Standing, rows: Relative, vocab_size: int) -> Placed:
        """See `Kernels.place`."""
        return place(standing, rows, vocab_size)

    def sprout(
        self, ranked: Ranked, above: Frontier, width: int, heat: Tensor, fits: Fits, kept: Tensor | None = None
    ) -> Sprouts:
        """See `Kernels.sprout`."""
        return sprout(ranked, above, width, heat, fits, kept)

    def walk(self, draws: Tensor, trees: Trees) -> Walks:
        """See `Kernels.walk`."""
        return walk(draws, trees)

    def compact(self, table: PageTable, slots: Tensor, trees: Trees, walks: Walks) -> None:
        """See `Kernels.compact`."""
        compact(table, slots, trees, walks)


def first_that_runs(device: torch.device) -> TritonKernels:
    """Kernels that have run once here: overlapping where the device and its driver can, else not.

    Raises:
        Exception: whatever a missing package, a compiler or a driver raises.
    """
    for overlap in (True, False) if can_overlap(device) else (False,):
        kernels = TritonKernels(device, overlap=overlap)
        try:
            zero = torch.zeros(1, 32, device=device)
            kernels.pack(zero.bfloat16())(kernels.rms_norm(zero, zero[0], 1.0))
            none = torch.zeros(1, dtype=torch.int32, device=device)
            kernels.draw(zero, zero[0, :1], none.long(), none, none).tolist()  # waits for the device
        except Exception as error:  # of a compiler or a driver that knows no overlap: each raises its own
            if not overlap:
                raise
            note = str(error).strip().splitlines() or [type(error).__name__]
            continue
        if not overlap and can_overlap(device):
            kernels.note = f"kernels do not overlap, slower: {note[0]}"
        break
    return kernels
