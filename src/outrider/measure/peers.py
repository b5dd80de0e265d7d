"""Transformers on the same device, prompts and weights, as others use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from outrider.measure.child import first_line
from outrider.measure.cycle import wait
from outrider.models.loader import causal_module
from outrider.models.twin import twin_module, widening_of

LOOKUP = 5
"""Tokens a guess of Transformers' prompt lookup."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine's figures over all prompts, or why there are none.

    Attributes:
        tokens_per_second: prompts read included. decoding: tokens per second behind the first token of each reply, by
            the seconds that these take beyond those of replies of one token; this is what plain decoding is set beside.
    """

    name: str
    tokens_per_second: float | None = None
    decoding: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    error: str | None = None

    @classmethod
    def of(cls, name: str, whole: tuple[int, float], first: tuple[int, float]) -> Peer:
        """From tokens and seconds of whole replies, and of replies of one token."""
        (tokens, seconds), (firsts, reading) = whole, first
        decoding = (tokens - firsts) / (seconds - reading) if tokens > firsts and seconds > reading else None
        return cls(name, tokens / seconds, decoding, tokens, seconds)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def transformers_peers(
    module: Any, prompts: Sequence[tuple[int, ...]], max_tokens: int, progress: Callable[[str], None]
) -> Iterator[Peer]:
    """Greedy `generate`, one prompt at a time: plain, with prompt lookup, and with a static cache that is compiled.

    Every reply has exactly `max_tokens` tokens. Two are answered before, the longest prompt first: for a longer one a
    static cache is made, and the model compiled, anew.
    """
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        f"prompt lookup {LOOKUP}": {"prompt_lookup_num_tokens": LOOKUP},
        "static cache, torch.compile": {"cache_implementation": "static"},
    }
    for way, keywords in ways.items():
        yield _transformers(f"Transformers, {way}", module, prompts, max_tokens, keywords, progress)


def _transformers(
    name: str,
    module: Any,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    keywords: dict[str, Any],
    progress: Callable[[str], None],
) -> Peer:
    progress(name)

    def run(prompt: tuple[int, ...], max_tokens: int) -> int:
        ids = torch.tensor([prompt], device=module.device)
        out = module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **keywords,
        )
        return int(out.shape[1] - ids.shape[1])

    def answer(max_tokens: int) -> tuple[int, float]:
        wait(module.device)
        started = time.perf_counter()
        tokens = sum(run(prompt, max_tokens) for prompt in prompts)
        wait(module.device)
        return tokens, time.perf_counter() - started

    try:
        for prompt in (max(prompts, key=len), prompts[0]):
            run(prompt, max_tokens)
        return Peer.of(name, answer(max_tokens), answer(1))
    except Exception as error:  # whatever a compiler or a cache of theirs raises is told in the report
        return Peer(name, error=first_line(error))


def twin_or_module(name: str, widen: str | None, device: torch.device) -> Any:
    """The weights that are measured as a module of Transformers, with its fastest attention.

    Raises:
        ModelError: if the model cannot be loaded or widened.
    """
    module = causal_module(name, str(device))
    if widen is not None:
        module = twin_module(module, widening_of(module, widen))
    module.set_attn_implementation("sdpa")
    return module
