"""What a kernel is told of rows that it warps: their fields, and the few tokens that are treated apart in each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Steps:
    """What becomes of a row beside what tokens of its own are treated apart; a step that no row needs is left out."""

    penalises: bool = False
    cuts_top: bool = False
    cuts_mass: bool = False
    cuts_least: bool = False

    def in_general(self) -> Steps | None:
        """One of the few kinds that graphs are taken of: rows skip by their own numbers what they do not need."""
        cuts = self.cuts_top or self.cuts_mass or self.cuts_least
        return Steps(self.penalises, cuts, cuts, cuts) if cuts or self.penalises else None

    def __or__(self, other: Steps) -> Steps:
        return Steps(
            self.penalises or other.penalises,
            self.cuts_top or other.cuts_top,
            self.cuts_mass or other.cuts_mass,
            self.cuts_least or other.cuts_least,
        )


@dataclass(frozen=True, slots=True)
class Fields:
    """The numbers that warp each row of a request: of `Warps` a row of `factors` and `bounds`, and one of `tops`."""

    factors: tuple[float, float, float, float] = (1.0, 1.0, 0.0, 0.0)
    bounds: tuple[float, float] = (1.0, -math.inf)
    top: int = 0

    @property
    def steps(self) -> Steps:
        top_p, least = self.bounds
        return Steps(self.factors[1:] != (1, 0, 0), self.top > 0, top_p < 1, least > -math.inf)


@dataclass(frozen=True, slots=True)
class Warps:
    """W rows of logits and what is to become of each; every row is described by itself.

    Attributes (contiguous, on the logits' device):
        steps: those that any row needs.
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
    """

    steps: Steps
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


@runtime_checkable
class WarpsRows(Protocol):
    """Kernels that warp rows themselves, many in one call; without it each is warped by operations of PyTorch."""

    def warp(self, logits: Tensor, warps: Warps) -> Tensor:
        """`sampling.warp.warp` of each row: logits (M, V) float32, never changed -> (W, V) float32.

        Masses of a nucleus are whole numbers of 2^-43 of the likeliest token's, so that no order of summing matters.
        A row that holds a NaN still holds it.
        """
