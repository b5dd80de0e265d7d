"""From logits to the law that is drawn from: the only maker of p and q.

Order and meaning of the steps are those of Transformers' logits processors: bias, penalties, bad words, minimum
length, grammar, then (with the temperature) top-k, top-p, min-p. Every step works on one row alone, so that a law
cannot depend on which rows are warped together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.errors import NumericsError, RequestError
from outrider.sampling.context import Context, Row

_HEAD = 1024
"""Tokens looked at before a nucleus needs the whole vocabulary sorted."""


def warp(logits: Tensor, row: Row) -> Tensor:
    """The weights of one row: `softmax(weights / temperature)` is the law, at temperature 0 the argmax.

    logits: (V,) float32, never changed -> (V,) float32, -inf where forbidden. A row that needs nothing, one that holds
    a NaN (which the draw then reports) and one that no walk can reach come back as they are.

    Raises:
        RequestError: the grammar names a token outside the vocabulary.
    """
    context = row.context
    if row.is_dead or not context.warps(row.position) or bool(torch.isnan(logits).any()):
        return logits
    weights = logits.clone()
    if context.params.logit_bias:
        weights[context.bias_ids] += context.bias
    if context.penalises:
        weights = _penalise(weights, row)
    _forbid(weights, row)
    if context.truncates:
        _truncate(weights, context)
    return weights


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


def laws(weights: Tensor, temperature: float) -> Tensor:
    """`law` of every row, each by itself: (N, V) float32 -> (N, V) float64."""
    return torch.stack([law(row, temperature) for row in weights])


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
    context, params = row.context, row.context.params
    for words in params.bad_words:
        if row.ends_with(words[:-1]):
            weights[words[-1]] = -math.inf
    if row.position < params.min_tokens:
        weights[context.end_ids] = -math.inf
    if params.automaton is None:
        return
    allowed = params.automaton.allowed(row.state)
    if allowed is None:
        return
    if any(not 0 <= token < weights.shape[0] for token in allowed):
        raise RequestError(f"the automaton allows a token that this model lacks: its ids end at {weights.shape[0] - 1}")
    forbidden = torch.ones_like(weights, dtype=torch.bool)
    forbidden[torch.tensor(list(allowed), dtype=torch.int64, device=weights.device)] = False
    weights.masked_fill_(forbidden, -math.inf)


def _truncate(weights: Tensor, context: Context) -> None:
    """Top-k (ties with the k-th stay, as in Transformers), top-p, min-p: -inf outside, in place."""
    params = context.params
    if 0 < params.top_k < weights.shape[0]:
        least = torch.topk(weights, params.top_k).values[-1]
        weights.masked_fill_(weights < least, -math.inf)
    if params.top_p < 1:
        _keep_nucleus(weights, context.temperature, params.top_p)
    if params.min_p > 0:
        scaled = weights.to(torch.float64) / context.temperature
        weights.masked_fill_(scaled < scaled.max() + math.log(params.min_p), -math.inf)


def _keep_nucleus(weights: Tensor, temperature: float, top_p: float) -> None:
    """Keep the fewest likeliest tokens that hold `top_p` (Holtzman et al., arXiv:1904.09751); ties by lowest id."""
    scaled = weights.to(torch.float64) / temperature
    total = torch.logsumexp(scaled, dim=0)
    head = torch.topk(scaled, min(_HEAD, scaled.shape[0])).values
    mass = (head - total).exp().cumsum(0)
    if mass[-1] < top_p and head.shape[0] < scaled.shape[0]:
        head = torch.sort(scaled, descending=True).values
        mass = (head - total).exp().cumsum(0)
    num_kept = 1 + int((mass[:-1] < top_p).sum())  # a token stays if the mass above it is less than top_p
    least = head[num_kept - 1]
    weights.masked_fill_(scaled < least, -math.inf)
    tied = (scaled == least).nonzero().flatten()
    num_tied_kept = num_kept - int((head[:num_kept] > least).sum())
    weights[tied[num_tied_kept:]] = -math.inf
