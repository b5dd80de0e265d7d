"""Transformers on the same device, prompts and weights, as others use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
    """One engine's figure: tokens per second over all prompts, prompts read included; or why there is none."""

    name: str
    tokens_per_second: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def transformers_peers(
    module: Any, prompts: Sequence[tuple[int, ...]], max_tokens: int, progress: Callable[[str], None]
) -> list[Peer]:
    """Greedy `generate`, one prompt at a time: plain, with prompt lookup, and with a static cache that is compiled.

    Every reply has exactly `max_tokens` tokens. The first prompt is answered once before, which compiles.
    """
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        f"prompt lookup {LOOKUP}": {"prompt_lookup_num_tokens": LOOKUP},
        "static cache, torch.compile": {"cache_implementation": "static"},
    }
    return [_transformers(f"Transformers, {way}", module, prompts, max_tokens, k, progress) for way, k in ways.items()]


def _transformers(
    name: str,
    module: Any,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    keywords: dict[str, Any],
    progress: Callable[[str], None],
) -> Peer:
    progress(name)

    def run(prompt: tuple[int, ...]) -> int:
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

    try:
        run(prompts[0])
        wait(module.device)
        started = time.perf_counter()
        tokens = sum(run(prompt) for prompt in prompts)
        wait(module.device)
    except Exception as error:  # whatever a compiler or a cache of theirs raises is told in the report
        return Peer(name, error=first_line(error))
    seconds = time.perf_counter() - started
    return Peer(name, tokens / seconds, tokens, seconds)


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
