"""Which tokens a model-like drafter proposes at a node: the law's own best under the very noise the target will use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.kernels.base import Kernels
from outrider.kernels.noise import gumbel
from outrider.sampling.context import Row
from outrider.sampling.warp import explain, law, warp


@dataclass(frozen=True, slots=True)
class Candidate:
    """A child to be: its token and the log of the chance that the target's draw is this token."""

    token: int
    log_weight: float


def matching(logits: Tensor, rows: Sequence[Row], width: int, kernels: Kernels) -> list[list[Candidate]]:
    """The `width` likeliest draws of the target at each row, if the drafter's law were the target's.

    Under the match rule draft and target share their noise, so the candidates are the top of `log q + g`, and under the
    noise it is the perturbed scores that rank them. logits: (A, V) float32; rows without a law get no candidates.
    """
    if width == 1:
        return [[Candidate(token, 0.0)] if token >= 0 else [] for token in _draw(logits, rows, kernels)]
    found: list[list[Candidate]] = []
    for row_logits, row in zip(logits, rows, strict=True):
        weights = _weights(row_logits, row)
        if explain(weights) is not None:
            found.append([])
            continue
        scores = weights.to(torch.float64)
        context = row.context
        if context.temperature > 0:
            noise = gumbel(
                torch.tensor([context.seed_bits]),
                torch.tensor([context.request.sample]),
                torch.tensor([row.position]),
                weights.shape[0],
            )
            scores = scores / context.temperature + noise[0].to(scores.device)
        best = torch.topk(scores, min(width, scores.shape[0]))
        total = float(torch.logsumexp(scores, dim=0))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found.append([Candidate(token, score - total) for token, score in pairs if score > -math.inf])
    return found


def draft_law(logits: Tensor, row: Row) -> Tensor | None:
    """The drafter's law at a row under the request's own sampling: (V,) float32; None where there is none."""
    weights = _weights(logits, row)
    if explain(weights) is not None:
        return None
    return law(weights, row.context.temperature).to(torch.float32)


def _weights(logits: Tensor, row: Row) -> Tensor:
    """As `warp`; nothing can be drawn where the request is at fault, which the target's own draw will tell it."""
    try:
        return warp(logits, row)
    except RequestError:
        return torch.full_like(logits, -math.inf)


def _draw(logits: Tensor, rows: Sequence[Row], kernels: Kernels) -> list[int]:
    if any(row.context.warps(row.position) for row in rows):
        logits = torch.stack([_weights(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)])
    device = logits.device
    tokens: list[int] = kernels.draw(
        logits,
        torch.tensor([row.context.temperature for row in rows], dtype=torch.float32, device=device),
        torch.tensor([row.context.seed_bits for row in rows], dtype=torch.int64, device=device),
        torch.tensor([row.context.request.sample for row in rows], dtype=torch.int32, device=device),
        torch.tensor([row.position for row in rows], dtype=torch.int32, device=device),
    ).tolist()
    return tokens
