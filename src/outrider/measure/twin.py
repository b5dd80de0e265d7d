"""Does a widened twin say what its original says? Text by text, and how near a tie was where one left the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from outrider.request import SamplingParams

OPTIONS = 2
"""Alternatives whose log-probabilities tell how near a tie was."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """A twin's texts against its original's.

    In float32 all are equal. In bfloat16 both round the same numbers, but their norms divide by sums of another length,
    so that one number in thousands rounds to a neighbour: a text may leave the other where two tokens nearly tie.

    Attributes:
        texts, differing: how many. tokens_alike: tokens before the first difference, over all tokens of the original.
        margins: at each first difference of a greedy text, the original's log-probability of its token less that of
            the other likeliest one; at other temperatures the noise decides, and there is none.
    """

    texts: int
    differing: int
    tokens_alike: float
    margins: tuple[float, ...]


def compare(
    open_original: Callable[[], Any],
    open_twin: Callable[[], Any],
    prompts: Sequence[tuple[int, ...]],
    laws: Sequence[SamplingParams],
) -> Likeness:
    """Let both answer the same prompts (token ids) under each law with the same seeds; only one is held at a time."""
    asked = [
        (prompt, replace(law, seed=number, logprobs=OPTIONS)) for law in laws for number, prompt in enumerate(prompts)
    ]
    said = []
    for opened in (open_original, open_twin):
        with closing(opened()) as llm:
            said.append(llm.generate([prompt for prompt, _ in asked], [params for _, params in asked]))
    differing, alike, total = 0, 0, 0
    margins: list[float] = []
    for (_, params), expected, found in zip(asked, *said, strict=True):
        ids, others = expected.token_ids, found.token_ids
        place = next(
            (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others))
        )
        total += len(ids)
        alike += place
        if ids != others:
            differing += 1
            if params.temperature == 0 and expected.logprobs is not None and place < len(ids):
                best, second = (chance for _, chance in expected.logprobs[place].top[:2])
                margins.append(best - second)
    return Likeness(len(asked), differing, alike / max(1, total), tuple(margins))
