"""What a request brought: one result a sample, and the pieces of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.record import Tally
from outrider.request import TokenLogprob


@dataclass(frozen=True, slots=True)
class Result:
    """One sample of one prompt.

    Attributes:
        token_ids: the completion, with the end token if the model said it; `text` leaves it out.
        seed: repeats this sample with the same `SamplingParams`. exactness: "seed" or "distribution".
        cached_tokens: prompt tokens whose keys were there already.
        logprobs: one a completion token; prompt_logprobs: one a prompt token, None for the first.
        tally: cycles, guesses, accepted guesses, seconds. drafter: "none" for plain decoding.
        error: why there is no more text, where finish_reason is "error".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    exactness: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    tally: Tally
    drafter: str
    error: str | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens over the seconds of the passes this request took part in."""
        return len(self.token_ids) / self.tally.seconds_total if self.tally.seconds_total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data, in the shape that `outrider generate --json` prints."""
        tally = self.tally
        data: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "exactness": self.exactness,
            "seed": self.seed,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.completion_tokens,
            },
            "speculation": {
                "drafter": self.drafter,
                "cycles": tally.cycles,
                "drafted": tally.drafted,
                "accepted": tally.accepted,
                "accepted_by_position": list(tally.accepted_by_position),
                "tau": tally.tau,
                "speed_up": tally.saving.to_json(),
            },
            "seconds": {
                "prefill": tally.seconds_prefill,
                "draft": tally.seconds_draft,
                "verify": tally.seconds_verify,
                "sample": tally.seconds_sample,
                "total": tally.seconds_total,
            },
            "tokens_per_second": self.tokens_per_second,
        }
        if self.logprobs is not None:
            data["logprobs"] = [_logprob_json(row) for row in self.logprobs]
        if self.prompt_logprobs is not None:
            data["prompt_logprobs"] = [row and _logprob_json(row) for row in self.prompt_logprobs]
        if self.error is not None:
            data["error"] = self.error
        return data


@dataclass(frozen=True, slots=True)
class Delta:
    """What one cycle added to a stream; the first `num_accepted` tokens were guesses. `result` on the last one."""

    text: str
    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0
    result: Result | None = None


def _logprob_json(row: TokenLogprob) -> dict[str, Any]:
    top = [{"token": token, "logprob": logprob} for token, logprob in row.top]
    return {"token": row.token, "logprob": row.logprob, "top": top}
