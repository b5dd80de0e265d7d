"""What a kernel is told of rows that it warps: their fields, and the few tokens that are treated apart in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Warps:
    """W rows of logits and what is to become of each; every row is described by itself.

    Attributes (contiguous, on the logits' device):
        rows: (W,) int32, where each lies among the logits.
        edges: (W, 4) int32; of `ids` and `values`, a row has its biases in [edges[0], edges[1]), the tokens of its path
            in [edges[1], edges[2]) and forbidden tokens in [edges[2], edges[3]).
        ids: (E,) int32. values: (E,) float32, read of biases.
        factors: (W, 4) float32: temperature (1 where nothing is truncated), repetition, frequency, presence penalty.
        bounds: (W, 2) float64: top_p (1: all), log of min_p (-inf: all). tops: (W,) int32, top_k (0: all).
        addresses: (W, 2) int64, of the tokens' counts (V,) int32 and of whether the prompt holds them (V,) bool; 0
            where nothing is penalised.
        masks: (K, ceil(V / 8)) uint8, a bit a token, lowest first, set where it is allowed. mask: (W,) int32, -1 where
            all are.
        cuts_top, cuts_mass, cuts_least: whether any row has a top_k, a top_p, a min_p.
    """

    rows: Tensor
    edges: Tensor
    ids: Tensor
    values: Tensor
    factors: Tensor
    bounds: Tensor
    tops: Tensor
    addresses: Tensor
    masks: Tensor
    mask: Tensor
    cuts_top: bool
    cuts_mass: bool
    cuts_least: bool


@runtime_checkable
class WarpsRows(Protocol):
    """Kernels that warp rows themselves, many in one call; without it each is warped by operations of PyTorch."""

    def warp(self, logits: Tensor, warps: Warps) -> Tensor:
        """`sampling.warp.warp` of each row: logits (M, V) float32, never changed -> (W, V) float32.

        Masses of a nucleus are whole numbers of 2^-43 of the likeliest token's, so that no order of summing matters.
        A row that holds a NaN still holds it.
        """
