"""How sure the target is of what it says: what a drafter could accept at most if it knew the law but not the draw.

At temperature T the target draws from its law p. Who knows p alone, and may name k tokens, is right with the mass of
the k likeliest: that bounds every drafter that does not share the noise. At temperature 0 there is nothing to draw, so
no such bound; the same figures then tell how narrow the choices were that a drafter has to get right.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import ConfigError
from outrider.measure.prompts import Prompt
from outrider.measure.survey import answers
from outrider.request import LogprobsMode

GUESSES = (1, 2, 4)
"""Siblings a level for which the bound is given."""


@dataclass(frozen=True, slots=True)
class Sureness:
    """Of one task's replies.

    Attributes:
        mass: mean mass of the k likeliest tokens, by k. doubtful: share of positions whose likeliest token has under
            one half. tau: mean accepted length, bonus included, of trees of `depth` levels that name the k likeliest
            tokens everywhere, by k.
    """

    positions: int
    depth: int
    mass: dict[int, float]
    doubtful: float
    tau: dict[int, float]


def sureness(
    llm: Any, tasks: Mapping[str, Sequence[Prompt]], params: Any, depth: int, raw: bool = False
) -> dict[str, Sureness]:
    """Answer the prompts by plain decoding and read the target's own law, warped as at `params`, off every position.

    At temperature 0 the law is that of temperature 1, on the greedy text.

    Args:
        llm: an `LLM` without a drafter.

    Raises:
        ConfigError: if a prompt failed.
    """
    mode = LogprobsMode.WARPED if params.temperature else LogprobsMode.RAW
    asked = replace(params, logprobs=max(GUESSES), logprobs_mode=mode)
    return {task: _of_task(llm, prompts, asked, depth, raw) for task, prompts in tasks.items()}


def _of_task(llm: Any, prompts: Sequence[Prompt], params: Any, depth: int, raw: bool) -> Sureness:
    # By reply and position: chances of the likeliest tokens, best first.
    replies = [
        [[math.exp(chance) for _, chance in row.top] for row in result.logprobs or ()]
        for result in answers(llm, prompts, params, raw)
    ]
    return summarise(replies, depth)


def summarise(replies: Sequence[Sequence[Sequence[float]]], depth: int) -> Sureness:
    """The figures of replies given as chances of the likeliest tokens, by position.

    Raises:
        ConfigError: for replies without a token.
    """
    rows = [row for reply in replies for row in reply]
    if not rows:
        raise ConfigError("no token was said: give other prompts, or raise max_tokens")
    masses = {k: [[sum(row[:k]) for row in reply] for reply in replies] for k in GUESSES}
    return Sureness(
        positions=len(rows),
        depth=depth,
        mass={k: statistics.fmean(sum(row[:k]) for row in rows) for k in GUESSES},
        doubtful=statistics.fmean(row[0] < 0.5 for row in rows),
        tau={k: _tau(found, depth) for k, found in masses.items()},
    )


def _tau(replies: Sequence[Sequence[float]], depth: int) -> float:
    """Tokens a cycle where every position is guessed right with its own chance: cycles are walked in expectation.

    From each position the expected number of tokens until the next cycle begins is that of a chain of `depth` guesses
    and the token the target adds; the number of cycles of a reply follows backwards from its end.
    """
    tokens = cycles = 0.0
    for chances in replies:
        left = [0.0] * (len(chances) + 1)  # expected cycles from position i to the end
        for i in reversed(range(len(chances))):
            reached, total = 1.0, 1.0
            for step in range(depth + 1):
                if i + step >= len(chances):
                    break
                right = chances[i + step] if step < depth else 0.0
                total += reached * (1 - right) * left[i + step + 1]
                reached *= right
            left[i] = total
        tokens, cycles = tokens + len(chances), cycles + (left[0] if chances else 0.0)
    return tokens / cycles
