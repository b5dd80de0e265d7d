"""What was asked and how far it has got: facts on the host, never a tensor."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from outrider.errors import RequestError
from outrider.record import CycleTrace, Tally
from outrider.registry import unknown


class Automaton(Protocol):
    """A grammar over tokens: the door through which masks reach every node of a tree.

    States are hashable and immutable; `advance` never changes the automaton, so a tree may walk many paths at once.
    """

    def start(self) -> Any:
        """The state before the first completion token."""

    def advance(self, state: Any, token: int) -> Any:
        """The state after `token`; only called with allowed tokens or tokens of a guess (then None: dead)."""

    def allowed(self, state: Any) -> Sequence[int] | None:
        """Allowed token ids in `state`, an array of integers too, or None for all of them; never empty."""


class LogprobsMode(enum.StrEnum):
    RAW = "raw"
    """The model's own law: log-softmax of its logits."""
    WARPED = "warped"
    """The law that was drawn from: after temperature, penalties, bias, masks, top-k, top-p and min-p."""


_LARGEST = 3.4e38
"""About the largest float32, the type of a law's arithmetic."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Neither NaN, nor infinite, nor so where a law is made."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _are_tokens(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(_is_whole(token) and token >= 0 for token in value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled; every field is honoured exactly at every position, or refused by name.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens (0: all). top_p: the smallest set of most likely tokens that holds this
            mass. min_p: tokens at least this share as likely as the likeliest. Applied in this order after temperature.
        repetition_penalty: over prompt and completion, as CTRL (arXiv:1909.05858). frequency_penalty,
            presence_penalty: over the completion, as OpenAI defines them.
        logit_bias: token id to a number added to its logit.
        bad_words: token sequences (or texts, which the front door encodes) that never appear in the completion.
        min_tokens: end tokens and stop_token_ids are forbidden before this many.
        max_tokens: at most this many completion tokens (None: to the end of the context).
        stop: strings that end the text before themselves. stop_token_ids: tokens that end it, like the model's own.
        ignore_eos: the model's own end tokens do not end it.
        seed: 0 <= seed < 2**64; drawn and returned where None. n: number of samples, with different noise.
        logprobs: number of top alternatives reported a completion token (None: no logprobs at all).
        logprobs_mode: of the model's own law, or of the warped law that was drawn from.
        prompt_logprobs: the same for the prompt's tokens.
        speculation: False draws this request plainly. depth, width: at most this many levels, and children of one node,
            for this request; no text depends on them. trace: keep what each cycle guessed, and what became of it.
        automaton: a grammar over tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    prompt_logprobs: int | None = None
    speculation: bool = True
    depth: int | None = None
    width: int | None = None
    trace: bool = False
    automaton: Automaton | None = None

    def __post_init__(self) -> None:
        def refuse(name: str, rule: str) -> None:
            raise RequestError(f"{name}={getattr(self, name)!r} is out of range: {rule}")

        for name in ("temperature", "min_p", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            if not _is_number(getattr(self, name)):
                refuse(name, "give a finite number")
        for name in ("top_k", "min_tokens", "n"):
            if not _is_whole(getattr(self, name)):
                refuse(name, "give a whole number")
        for name in ("max_tokens", "logprobs", "prompt_logprobs", "seed", "depth", "width"):
            if getattr(self, name) is not None and not _is_whole(getattr(self, name)):
                refuse(name, "give a whole number or leave it out")
        for name in ("ignore_eos", "speculation", "trace"):
            if not isinstance(getattr(self, name), bool):
                refuse(name, "give True or False")
        if self.logprobs_mode not in tuple(LogprobsMode):
            refuse("logprobs_mode", f"choose one of {', '.join(LogprobsMode)}")
        object.__setattr__(self, "logprobs_mode", LogprobsMode(self.logprobs_mode))
        if self.automaton is not None and not all(hasattr(self.automaton, v) for v in ("start", "advance", "allowed")):
            refuse("automaton", "it has the methods start, advance and allowed")
        if self.temperature < 0:
            refuse("temperature", "0 is greedy, larger is more varied")
        if self.top_k < 0:
            refuse("top_k", "0 keeps all tokens, k > 0 keeps k")
        if not 0 < self.top_p <= 1:
            refuse("top_p", "it lies in (0, 1], 1 keeps all tokens")
        if not 0 <= self.min_p <= 1:
            refuse("min_p", "it lies in [0, 1], 0 keeps all tokens")
        if self.repetition_penalty <= 0:
            refuse("repetition_penalty", "it is above 0, 1 changes nothing")
        if self.min_tokens < 0:
            refuse("min_tokens", "it is at least 0")
        if self.max_tokens is not None and self.max_tokens < 1:
            refuse("max_tokens", "it is at least 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", f"it cannot exceed max_tokens={self.max_tokens}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            refuse("seed", "it lies in 0 .. 2**64 - 1")
        if self.n < 1:
            refuse("n", "it is at least 1")
        for name in ("logprobs", "prompt_logprobs", "depth"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                refuse(name, "it is at least 0")
        if self.width is not None and self.width < 1:
            refuse("width", "it is at least 1")
        if not isinstance(self.stop, (tuple, list)) or not all(isinstance(s, str) and s for s in self.stop):
            refuse("stop", "give a tuple of non-empty strings")
        if not _are_tokens(self.stop_token_ids):
            refuse("stop_token_ids", "give a tuple of token ids")
        if not isinstance(self.bad_words, (tuple, list)) or not all(
            words and (isinstance(words, str) or _are_tokens(words)) for words in self.bad_words
        ):
            refuse("bad_words", "give a tuple of non-empty texts or tuples of token ids")
        if not isinstance(self.logit_bias, Mapping) or not (
            _are_tokens(tuple(self.logit_bias))
            and all(_is_number(bias) or bias == -math.inf for bias in self.logit_bias.values())
        ):
            refuse("logit_bias", "map token ids to numbers")

    @classmethod
    def of(cls, **settings: Any) -> SamplingParams:
        """Build from keywords; an unknown one is refused with the nearest known name.

        Raises:
            RequestError: for an unknown field or a value out of range.
        """
        problem = unknown("sampling field", settings, [f.name for f in fields(cls)])
        if problem:
            raise RequestError(problem)
        return cls(**settings)


class Phase(enum.Enum):
    WAITING = "waiting"
    """Holds no slots (new, or preempted)."""
    RUNNING = "running"
    """Holds slots: prefilling while `num_pending > 1`, else decoding."""
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one delivered token, and of the likeliest alternatives `(token, logprob)`, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False, slots=True)
class Request:
    """One sample of one prompt on its way through the engine; only the scheduler and `settle` change it.

    Attributes:
        id: unique in its engine. seed, sample: with the output position, the whole key of its noise.
        prompt: prompt token ids. output: delivered completion token ids.
        end_ids: tokens that end it (the model's own unless ignore_eos, and stop_token_ids).
        limit: at most this many completion tokens (max_tokens, cut to the context).
        client: whose it is; clients share the engine equally. priority: a larger number yields to all smaller ones.
        cycles: where a trace is wanted, one entry a pass that delivered.
        num_cached: prompt tokens whose keys were there when it was first admitted; None before.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    sample: int = 0
    end_ids: frozenset[int] = frozenset()
    limit: int = 0
    client: str = ""
    priority: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    num_cached: int | None = None
    tally: Tally = field(default_factory=Tally)
    cycles: list[CycleTrace] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of the known sequence (prompt, then completion) in `[start, stop)`."""
        split = len(self.prompt)
        if start >= split:
            return self.output[start - split : stop - split]
        return [*self.prompt[start:stop], *self.output[: max(0, stop - split)]]

    @property
    def is_finished(self) -> bool:
        return self.phase is Phase.FINISHED
