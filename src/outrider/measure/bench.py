"""How fast, against plain decoding and against Transformers: runs take turns, ratios are taken prompt by prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from outrider.errors import ConfigError
from outrider.measure.prompts import Prompt
from outrider.record import Tally

PLAIN = "plain"
"""The contender that the others are compared with."""


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt answered once: completion tokens, seconds of the clock from prompt to last token, what was guessed."""

    tokens: int
    seconds: float
    tally: Tally | None = None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Contender(Protocol):
    """Anything that answers a prompt greedily with at most so many tokens."""

    def __call__(self, prompt: Prompt, max_tokens: int) -> Run: ...


@dataclass(slots=True)
class Figures:
    """One contender's runs, in the order of the prompts."""

    runs: list[Run] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Pooled tokens per second, prompts read included."""
        return sum(run.tokens for run in self.runs) / sum(run.seconds for run in self.runs)

    def ratio(self, other: Figures) -> float:
        """Median over prompts of this contender's rate over the other's."""
        return statistics.median(a.rate / b.rate for a, b in zip(self.runs, other.runs, strict=True))

    def pooled(self) -> Tally:
        tally = Tally()
        for run in self.runs:
            if run.tally is not None:
                tally.add(run.tally)
        return tally

    def to_json(self, plain: Figures) -> dict[str, Any]:
        tally = self.pooled()
        return {
            "runs": len(self.runs),
            "tokens_per_second": self.rate,
            "ratio_to_plain": self.ratio(plain),
            "least_ratio": min(a.rate / b.rate for a, b in zip(self.runs, plain.runs, strict=True)),
            "tau": tally.tau,
            "drafted": tally.drafted,
            "accepted": tally.accepted,
        }


def bench(
    contenders: Mapping[str, Contender],
    prompts: Sequence[Prompt],
    max_tokens: int,
    repeats: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Figures]:
    """Let every contender answer every prompt; who begins changes from prompt to prompt. A failed run is a failure.

    Raises:
        ConfigError: without prompts, or where nobody is called `PLAIN`.
    """
    if not prompts or PLAIN not in contenders:
        raise ConfigError("nothing to measure: give at least one prompt")
    names = list(contenders)
    figures = {name: Figures() for name in names}
    for contender in contenders.values():
        contender(prompts[0], 8)  # warm-up: caches, threads, lazily made tables
    for turn in range(repeats * len(prompts)):
        prompt = prompts[turn % len(prompts)]
        start = turn % len(names)
        for name in (*names[start:], *names[:start]):
            figures[name].runs.append(contenders[name](prompt, max_tokens))
        progress(turn + 1, repeats * len(prompts))
    return figures


def ours(llm: Any, params: Any, raw: bool = False) -> Contender:
    """An `LLM` as a contender; `params` are its `SamplingParams`, whose `max_tokens` is set a run."""

    def run(prompt: Prompt, max_tokens: int) -> Run:
        started = time.perf_counter()
        (result,) = llm.generate([prompt.content], replace(params, max_tokens=max_tokens), raw=raw)
        seconds = time.perf_counter() - started
        if result.error is not None:
            raise ConfigError(f"{prompt.name} failed: {result.error}")
        return Run(result.completion_tokens, seconds, result.tally)

    return run


def transformers_generate(llm: Any, dtype: str, raw: bool = False) -> Contender:
    """`transformers` `generate`, greedy, on the same weights (dequantised), prompt ids, ends and threads."""
    import torch
    from transformers import AutoModelForCausalLM

    from outrider.models.loader import locate
    from outrider.models.twin import twin_module, widening_of

    folder, extra = locate(llm.config.model).reference()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **extra)
    model.to(llm.engine.target.device).eval()
    if llm.config.widen is not None:
        model = twin_module(model, widening_of(model, llm.config.widen))
    ends = sorted(llm.engine.target.eos_ids)

    def run(prompt: Prompt, max_tokens: int) -> Run:
        started = time.perf_counter()
        ids = torch.tensor([llm.encode(prompt.content, raw)], device=model.device)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0] if ends else 0,
        )
        return Run(int(out.shape[1] - ids.shape[1]), time.perf_counter() - started)

    return run
