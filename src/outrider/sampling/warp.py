"""From logits to the law that is drawn from: the only maker of p and q.

Order and meaning of the steps are those of Transformers' logits processors: bias, penalties, bad words, minimum
length, grammar, then (with the temperature) top-k, top-p, min-p. Every step works on one row alone, so that a law
cannot depend on which rows are warped together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.errors import NumericsError, RequestError
from outrider.sampling.context import Context, Row
from outrider.sampling.rows import warp_rows

_HEAD = 1024
"""Tokens that are ranked before the whole vocabulary is, which few laws need."""


def warp(logits: Tensor, row: Row) -> Tensor:
    """The weights of one row: `softmax(weights / temperature)` is the law, at temperature 0 the argmax.

    logits: (V,) float32, never changed -> (V,) float32, -inf where forbidden. A row that needs nothing, one that holds
    a NaN (which the draw then reports) and one that no walk can reach come back as they are. Where the request has a
    `warper`, its kernels do all this, of one row as of many.

    Raises:
        RequestError: the grammar fails, or names a token outside the vocabulary.
    """
    context = row.context
    if row.is_dead or not context.warps(row.position):
        return logits
    if context.warper is not None:
        return warp_rows(context.warper, logits.unsqueeze(0), (0,), (row,))[0]
    if bool(torch.isnan(logits).any()):
        return logits
    weights = logits.clone()
    if context.params.logit_bias:
        weights[context.bias_ids] += context.bias
    if context.penalises:
        weights = _penalise(weights, row)
    _forbid(weights, row)
    return _truncate(weights, context) if context.truncates else weights


def law(weights: Tensor, temperature: float) -> Tensor:
    """`softmax(weights / temperature)`; at temperature 0 all mass on the lowest id of the largest weight.

    weights: (V,) float32 -> (V,) float64.

    Raises:
        NumericsError: the row holds a NaN or +inf. RequestError: every token is forbidden.
    """
    problem = explain(weights)
    if problem is not None:
        raise problem
    if temperature == 0:
        one_hot = torch.zeros_like(weights, dtype=torch.float64)
        one_hot[(weights == weights.max()).nonzero()[0]] = 1.0
        return one_hot
    return torch.softmax(weights.to(torch.float64) / temperature, dim=0)


def laws(weights: Tensor, temperatures: Sequence[float]) -> Tensor:
    """`law` of many rows, each at a temperature above 0; all NaN where there is none.

    weights: (W, V) float32 -> (W, V) float64.
    """
    scaled = weights.to(torch.float64)
    if any(temperature != 1.0 for temperature in temperatures):
        column = torch.from_numpy(np.array(temperatures)[:, None])
        scaled.div_(column.to(weights.device, non_blocking=True))
    return torch.softmax(scaled, dim=1)


def explain(weights: Tensor) -> NumericsError | RequestError | None:
    """Why no token can be drawn from a row of weights (V,), or None if one can."""
    largest = float(weights.max())  # a NaN anywhere makes it NaN
    if math.isnan(largest) or largest == math.inf:
        return NumericsError("the model gave NaN or infinite logits: load it in float32, or check its weights")
    if largest == -math.inf:
        return RequestError(
            "no token is left to draw: automaton, bad_words, logit_bias and min_tokens together forbid all of them"
        )
    return None


def _penalise(weights: Tensor, row: Row) -> Tensor:
    """Repetition penalty (CTRL, arXiv:1909.05858), then OpenAI's `- count * frequency - (count > 0) * presence`."""
    context, params = row.context, row.context.params
    counts = context.counts(row.path)
    said = counts > 0
    if params.repetition_penalty != 1:
        assert context.in_prompt is not None
        penalty = params.repetition_penalty
        penalised = torch.where(weights < 0, weights * penalty, weights / penalty)
        weights = torch.where(said | context.in_prompt, penalised, weights)
    if params.frequency_penalty:
        weights = weights - counts * params.frequency_penalty
    if params.presence_penalty:
        weights = weights - said * params.presence_penalty
    return weights


def _forbid(weights: Tensor, row: Row) -> None:
    """Bad words, end tokens before min_tokens, and what the grammar does not allow: -inf, in place."""
    barred = row.forbidden()
    if barred:
        weights[torch.tensor(barred, device=weights.device)] = -math.inf
    allowed = row.context.allowed(row.state)
    if allowed is None:
        return
    forbidden = torch.ones_like(weights, dtype=torch.bool)
    forbidden[torch.from_numpy(allowed).to(weights.device)] = False
    weights.masked_fill_(forbidden, -math.inf)


def _truncate(weights: Tensor, context: Context) -> Tensor:
    """Top-k (ties with the k-th stay, as in Transformers), top-p and min-p: each keeps a prefix of one ranking.

    The ranking is by descending weight, ties by lowest id. A head of it is enough if it goes on past the prefix.
    """
    vocab_size = weights.shape[0]
    for size in (min(_HEAD, vocab_size), vocab_size):
        values, ids = _ranking(weights, size)
        num_kept = _num_kept(values, weights, context)
        if num_kept is not None:
            break
    assert num_kept is not None
    kept = torch.full_like(weights, -math.inf)
    kept[ids[:num_kept]] = values[:num_kept]
    return kept


def _ranking(weights: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The first `size` tokens by descending weight; among those tied with the last, which ones is left open."""
    if size == weights.shape[0]:
        ranked = torch.sort(weights, descending=True, stable=True)
        return ranked.values, ranked.indices
    ids = torch.topk(weights, size, sorted=False).indices.sort().values
    ranked = torch.sort(weights[ids], descending=True, stable=True)
    return ranked.values, ids[ranked.indices]


def _num_kept(values: Tensor, weights: Tensor, context: Context) -> int | None:
    """How many tokens of a ranking's head survive; None if the head may be too short to tell.

    values: (K,) float32, descending; weights: (V,) float32, all of them.
    """
    params, temperature = context.params, context.temperature
    complete = values.shape[0] == weights.shape[0]
    # Ties with the head's last token may lie outside it.
    num_known = values.shape[0] if complete else int((values > values[-1]).sum())
    scaled = values.to(torch.float64) / temperature
    num_kept = values.shape[0]
    if 0 < params.top_k < weights.shape[0]:
        if params.top_k > num_known:
            return None
        num_kept = int((values >= values[params.top_k - 1]).sum())
    if params.top_p < 1:
        # The nucleus (arXiv:1904.09751) of what top-k left: a token stays if the mass above it is too little.
        whole = (
            scaled[:num_kept] if 0 < params.top_k < weights.shape[0] else weights.to(torch.float64).div_(temperature)
        )
        total = (whole - scaled[0]).exp_().sum()
        mass = (scaled[:num_kept] - scaled[0]).exp_().cumsum(0)
        num_kept = min(num_kept, 1 + int((mass < params.top_p * total).sum()))
    if params.min_p > 0:
        num_kept = min(num_kept, int((scaled >= scaled[0] + math.log(params.min_p)).sum()))
    return num_kept if num_kept <= num_known else None
