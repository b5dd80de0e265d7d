"""Log-probabilities of delivered and prompt tokens; each row by itself, so that company cannot change a digit."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.request import LogprobsMode, TokenLogprob
from outrider.sampling.context import Context
from outrider.sampling.warp import law, warp
from outrider.tree import DraftTree, Verdict

_SLACK = 1e-12
"""Taken off every log-probability, so that no rounding lifts a sum of probabilities above 1."""


def of_verdict(
    context: Context, tree: DraftTree, verdict: Verdict, logits: Tensor, num_delivered: int
) -> list[TokenLogprob]:
    """One entry for each of the verdict's first `num_delivered` tokens; call it before they enter the output.

    logits: (N + 1, V) float32, the rows of this request's tree, the root's first.

    Raises:
        NumericsError, RequestError: as `law`.
    """
    params = context.params
    assert params.logprobs is not None
    rows = context.rows(tree)
    out = []
    for node, token in zip((-1, *verdict.path), verdict.tokens[:num_delivered], strict=False):
        weights, temperature = logits[node + 1], 1.0
        if params.logprobs_mode is LogprobsMode.WARPED:
            weights, temperature = warp(weights, rows[node + 1]), context.temperature
        out.append(of_token(weights, temperature, token, params.logprobs))
    return out


def of_prompt(logits: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    """Of prompt tokens under the model's own law: logits (M, V) float32, row `i` being the one before `tokens[i]`.

    Prompt tokens were never drawn, so there is no warped law of them. A prompt's first token has no row before it.
    """
    return [of_token(row, 1.0, token, num_top) for row, token in zip(logits, tokens, strict=True)]


def of_token(weights: Tensor, temperature: float, token: int, num_top: int) -> TokenLogprob:
    """`log softmax(weights / temperature)` at a token, and at the `num_top` likeliest, ties by lowest id.

    weights: (V,) float32. Tokens of probability 0 are no alternatives, so a narrow law has fewer.

    Raises:
        NumericsError, RequestError: as `law`.
    """
    logprobs = law(weights, temperature).log() - _SLACK
    top: list[tuple[int, float]] = []
    if num_top > 0:
        least = torch.topk(logprobs, min(num_top, logprobs.shape[0])).values[-1]
        ids = (logprobs >= least).nonzero().flatten()  # ascending, ties with the last included
        order = torch.sort(logprobs[ids], descending=True, stable=True)
        top = [
            (int(ids[i]), float(value))
            for value, i in zip(order.values[:num_top], order.indices[:num_top], strict=True)
            if value > -torch.inf
        ]
    return TokenLogprob(token, float(logprobs[token]), tuple(top))
