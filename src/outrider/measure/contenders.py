"""Who is timed by `bench`: this engine as its front door runs it, and Transformers; and what a run of one tells."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from outrider.errors import ConfigError, OutriderError
from outrider.measure.prompts import Prompt
from outrider.record import Record, Tally

if TYPE_CHECKING:
    from outrider.engine.ends import Emission


@dataclass(slots=True)
class Parts:
    """Where a run's seconds went.

    Attributes:
        prompt: passes that read prompts, decoding rows among them or not. draft, verify, sample, other: of passes that
            only decode. flying: of cycles in flight, whose parts nobody times. outside: beside all passes.
        passes, delivered: how many passes only decoded, and the tokens that they brought.
    """

    prompt: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    other: float = 0.0
    flying: float = 0.0
    outside: float = 0.0
    passes: int = 0
    delivered: int = 0

    def count(self, record: Record) -> None:
        """Take in a pass."""
        if record.prefill_rows or not record.cycles:
            self.prompt += record.seconds_total
            return
        self.passes += 1
        self.delivered += sum(cycle.delivered for cycle in record.cycles)
        if record.overlaps:
            self.flying += record.seconds_total
            return
        self.draft += record.seconds_draft
        self.verify += record.seconds_verify
        self.sample += record.seconds_sample
        self.other += record.seconds_total - record.seconds_draft - record.seconds_verify - record.seconds_sample

    def add(self, more: Parts) -> None:
        """Pool another run's into these."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(more, name))

    @property
    def decoding(self) -> float:
        """Seconds of the passes that only decode."""
        return self.draft + self.verify + self.sample + self.other + self.flying


@dataclass(frozen=True, slots=True)
class Run:
    """Some prompts answered once, together: completion tokens, seconds of the clock from prompts to last token.

    Attributes:
        tally: what was guessed. first: seconds to each prompt's first token. gaps: seconds between what one cycle and
            the next brought to a prompt. between: each prompt's mean seconds a token behind its first.
        misses: of passes that only decode, without guesses and with, by how much of their time control's prices were
            wrong: |expected / taken - 1|. context: mean known tokens in the middle of an answer. error: why there is no
            answer; then there is no figure.
    """

    tokens: int = 0
    seconds: float = 0.0
    tally: Tally | None = None
    first: tuple[float, ...] = ()
    gaps: tuple[float, ...] = ()
    between: tuple[float, ...] = ()
    parts: Parts | None = None
    misses: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    context: int = 0
    error: str | None = None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second of the passes that only decode; None where there was none, or nobody knows."""
        return self.parts.delivered / self.parts.decoding if self.parts and self.parts.decoding else None


class Contender(Protocol):
    """Anything that answers prompts together, each with at most so many tokens."""

    def __call__(self, prompts: Sequence[Prompt], max_tokens: int) -> Run: ...


@dataclass(slots=True)
class _Watch:
    """Notes when each request was given what."""

    began: float
    parts: Parts = field(default_factory=Parts)
    moments: dict[int, list[float]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    misses: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def __call__(self, emissions: Sequence[Emission], record: Record) -> None:
        now = time.perf_counter() - self.began
        self.parts.count(record)
        if record.seconds_expected is not None:
            guesses = any(cycle.asked or cycle.drafted for cycle in record.cycles)
            self.misses[guesses].append(abs(record.seconds_expected / record.seconds_total - 1))
        for emission in emissions:
            if emission.tokens:
                number = emission.request.id
                self.moments.setdefault(number, []).append(now)
                self.counts[number] = self.counts.get(number, 0) + len(emission.tokens)

    def gaps(self) -> tuple[float, ...]:
        return tuple(b - a for each in self.moments.values() for a, b in itertools.pairwise(each))

    def between(self) -> tuple[float, ...]:
        return tuple(
            (each[-1] - each[0]) / (self.counts[n] - 1) for n, each in self.moments.items() if self.counts[n] > 1
        )


def ours(llm: Any, params: Any, raw: bool = False) -> Contender:
    """An `LLM` as a contender; `params` are its `SamplingParams`, whose `max_tokens` and seeds are set a run."""

    def run(prompts: Sequence[Prompt], max_tokens: int) -> Run:
        seed = params.seed or 0
        each = [replace(params, max_tokens=max_tokens, seed=seed + number) for number in range(len(prompts))]
        watch = _Watch(time.perf_counter())
        try:
            results = llm.generate([prompt.content for prompt in prompts], each, raw=raw, watch=watch)
        except OutriderError as error:
            return Run(error=str(error))
        seconds = time.perf_counter() - watch.began
        failed = [f"{p.name}: {r.error}" for p, r in zip(prompts, results, strict=True) if r.error is not None]
        if llm.engine.fault is not None:  # texts went on plainly, and their speed is nobody's
            return Run(error=str(llm.engine.fault))
        if failed:
            return Run(error="; ".join(failed))
        tally = Tally()
        for result in results:
            tally.add(result.tally)
        watch.parts.outside = seconds - watch.parts.prompt - watch.parts.decoding
        tokens = sum(result.completion_tokens for result in results)
        context = (sum(result.prompt_tokens for result in results) + tokens // 2) // len(results)
        first = tuple(each[0] for each in watch.moments.values())
        misses = tuple(watch.misses[False]), tuple(watch.misses[True])
        return Run(tokens, seconds, tally, first, watch.gaps(), watch.between(), watch.parts, misses, context)

    return run


def fixed(llm: Any, contender: Contender, depth: int, width: int) -> Contender:
    """The contender of this `LLM` with its tree filled in every cycle; its control is none the wiser."""

    def run(prompts: Sequence[Prompt], max_tokens: int) -> Run:
        try:
            with llm.always_guessing(depth, width, apart=True):
                return contender(prompts, max_tokens)
        except Exception as error:  # a drafter's fault is raised there, whatever it is
            return Run(error=(str(error).strip().splitlines() or [type(error).__name__])[0])

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

    def run(prompts: Sequence[Prompt], max_tokens: int) -> Run:
        if len(prompts) != 1:
            raise ConfigError("Transformers' generate is timed alone: one prompt at once")
        started = time.perf_counter()
        ids = torch.tensor([llm.encode(prompts[0].content, raw)], device=model.device)
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
