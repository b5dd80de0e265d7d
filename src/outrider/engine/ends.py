"""The one boundary rule: token by token, so that ids, text, logprobs, usage and reason always end at the same place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.text import TextStream
from outrider.request import FinishReason, Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class Emission:
    """What one request delivered in one cycle.

    Attributes:
        tokens: delivered ids; the first `num_accepted` of them were guesses. text: text that became certain.
    """

    request: Request
    tokens: tuple[int, ...]
    num_accepted: int
    text: str = ""


def deliver(
    request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, text: TextStream | None
) -> Emission:
    """Append tokens one by one until an end: an end token, a stop string, or the limit, whichever comes first.

    Args:
        tokens: what the verdict says, at least one. logprobs: one row a token where asked for.
    """
    first = len(request.output)
    for index, token in enumerate(tokens):
        request.output.append(token)
        if logprobs is not None:
            request.logprobs.append(logprobs[index])
        # An end token is in the ids and not in the text.
        ended = token in request.end_ids
        if ended or (text is not None and text.push(token)):
            request.finish_reason = FinishReason.STOP
        elif len(request.output) >= request.limit:
            request.finish_reason = FinishReason.LENGTH
        if request.finish_reason is not None:
            break
    delivered = tuple(request.output[first:])
    over = request.finish_reason is not None
    if text is not None and over:
        text.finish()
    return Emission(request, delivered, len(delivered) - 1, text.take(final=over) if text is not None else "")


def fail(request: Request, error: Exception, text: TextStream | None) -> Emission:
    """End a request that cannot go on; what it said before stays, with the text that was held back.

    A prompt that led to nothing is not told of: how much of it was told by now depends on the size of its chunks.
    """
    request.error, request.finish_reason = error, FinishReason.ERROR
    if not request.output:
        request.prompt_logprobs.clear()
    if text is not None:
        text.finish()
    return Emission(request, (), 0, text.take(final=True) if text is not None else "")
