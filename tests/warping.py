"""Toy kernels that warp rows as a device's do, by what they are told alone: fields, edges, addresses."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.warps import Warps
from outrider.sampling.warp import _truncate
from tests.toy import ToyKernels, ToyModel, ToyTarget


class WarpingKernels(ToyKernels):
    """Steps that they were not told of are left out, as a device leaves them out."""

    def warp(self, logits: Tensor, warps: Warps) -> Tensor:
        return torch.stack([_warped(logits[int(place)], warps, row) for row, place in enumerate(warps.rows)])


def _warped(logits: Tensor, warps: Warps, row: int) -> Tensor:
    weights, steps = logits.clone(), warps.steps
    first, path, forbidden, end = warps.edges[row].tolist()
    ids = warps.ids.long()
    weights[ids[first:path]] += warps.values[first:path]
    counts, prompt = warps.addresses[row].tolist()
    if counts:
        assert steps.penalises
        said = _at(counts, ctypes.c_int32, logits)
        weights = _penalised(weights, warps.factors[row, 1:].tolist(), said, ids[path:forbidden], prompt)
    weights[ids[forbidden:end]] = -torch.inf
    top_k, (top_p, least) = int(warps.tops[row]), warps.bounds[row].tolist()
    asked = SimpleNamespace(
        top_k=top_k if steps.cuts_top else 0,
        top_p=top_p if steps.cuts_mass else 1.0,
        min_p=float(np.exp(least)) if steps.cuts_least else 0.0,
    )
    return _truncate(weights, SimpleNamespace(params=asked, temperature=float(warps.factors[row, 0])))


def _penalised(weights: Tensor, penalties: list[float], counts: Tensor, path: Tensor, prompt: int) -> Tensor:
    repetition, frequency, presence = penalties
    counts = counts.clone()
    for token in path.tolist():
        if token >= 0:
            counts[token] += 1
    said = counts > 0
    known = said | _at(prompt, ctypes.c_bool, weights)
    weights = torch.where(known, torch.where(weights < 0, weights * repetition, weights / repetition), weights)
    return weights - counts * frequency - said * presence


def _at(address: int, kind: type, like: Tensor) -> Tensor:
    array = (kind * like.shape[0]).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(array).copy())


class WarpingTarget(ToyTarget):
    """The toy, on kernels that warp."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kernels = WarpingKernels()
        self.model = ToyModel(self.kernels)
