"""The offline front door: prompts in, results out; speculation decides only how soon they come."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from outrider.config import EngineConfig
from outrider.engine.ends import Emission
from outrider.engine.resolve import Resolved, assemble
from outrider.engine.step import Engine
from outrider.engine.text import TextStream
from outrider.errors import RequestError
from outrider.record import Tally
from outrider.request import Request, SamplingParams, TokenLogprob

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a conversation (`role`, `content`)."""


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


class LLM:
    """A model with a drafter, ready to generate.

    >>> llm = LLM("smollm2-135m-instruct", drafter="ngram")          # doctest: +SKIP
    >>> llm.generate("Name three rivers.", SamplingParams(seed=1))    # doctest: +SKIP

    Args:
        model: alias, folder, `.gguf` file or hub id.
        settings: any field of `EngineConfig`.

    Raises:
        ConfigError, ModelError, KernelError, CapacityError: one sentence each, with the remedy.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = EngineConfig.of(model=model, **settings)
        self.engine: Engine
        self.resolved: Resolved
        self.engine, self.resolved = assemble(self.config)
        self.tokenizer = self.engine.target.tokenizer
        self._ids = itertools.count()
        self._inboxes: dict[int, deque[Emission]] = {}  # of streams that are being read

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        raw: bool = False,
    ) -> list[Result]:
        """All samples of all prompts, prompt by prompt, decoded together.

        Args:
            prompts: one or many. params: for all of them, or one each.
            raw: leave texts as they are instead of putting them through the model's chat template.

        Raises:
            RequestError: where a prompt or its params cannot be honoured exactly; nothing was generated then.
        """
        many = self._many(prompts)
        each = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(each)} params for {len(many)} prompts: give one for all, or one each")
        requests = [
            request
            for prompt, param in zip(many, each, strict=True)
            for request in self._requests(self.encode(prompt, raw), param)
        ]
        streams = [self._stream_of(request) if request.params.stop else None for request in requests]
        try:
            for request, stream in zip(requests, streams, strict=True):
                self.engine.add(request, stream)
            while any(not request.is_finished for request in requests):
                self._step()
        finally:
            for request in requests:
                self.engine.abort(request)
        return [self._result(request, stream) for request, stream in zip(requests, streams, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, raw: bool = False) -> Iterator[Delta]:
        """One prompt's text as it comes, a delta a cycle; closing the iterator early frees its slots.

        Several streams, and calls of `generate` beside them, share their passes: nobody misses what another's step
        brought.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n={params.n} cannot be streamed: stream one sample, or use generate")
        (request,) = self._requests(self.encode(prompt, raw), params)
        stream = self._stream_of(request)
        self.engine.add(request, stream)
        inbox = self._inboxes[request.id] = deque()
        try:
            while inbox or not request.is_finished:
                if not inbox:
                    self._step()
                    continue
                emission = inbox.popleft()
                result = self._result(request, stream) if request.is_finished and not inbox else None
                yield Delta(emission.text, emission.tokens, emission.num_accepted, result)
        finally:
            del self._inboxes[request.id]
            self.engine.abort(request)

    def always_guessing(self, depth: int = 4) -> AbstractContextManager[None]:
        """For tests of exactness: within this block every decode pass guesses, whether that pays or not."""
        return self.engine.always_guessing(depth)

    def encode(self, prompt: Prompt, raw: bool = False) -> tuple[int, ...]:
        """Token ids of a prompt; a text or messages go through the chat template where there is one.

        Raises:
            RequestError: for an empty prompt, ids outside the vocabulary, or messages without a template.
        """
        if isinstance(prompt, str):
            templated = bool(self.tokenizer.chat_template) and not raw
            ids = self._apply([{"role": "user", "content": prompt}]) if templated else self.tokenizer.encode(prompt)
        elif prompt and all(isinstance(message, Mapping) for message in prompt):
            if not self.tokenizer.chat_template:
                raise RequestError("this model has no chat template: give the prompt as one text")
            ids = self._apply([dict(message) for message in prompt if isinstance(message, Mapping)])
        else:
            ids = list(prompt)
        vocab_size = self.engine.target.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestError(f"prompt token {token!r} is no id of this model: ids lie in 0 .. {vocab_size - 1}")
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        bos = self.tokenizer.bos_token_id
        if bos is not None and list(ids[:2]) == [bos, bos]:
            raise RequestError(
                f"the prompt begins with two BOS tokens (id {bos}), which no model was trained on: "
                "leave the BOS out of the text, or out of the chat template"
            )
        return tuple(ids)

    def describe(self) -> dict[str, Any]:
        """What was found at start and decided from it, as plain data."""
        return self.resolved.to_json()

    def close(self) -> None:
        """Give up what still runs; memory returns with the object."""
        for request in (*self.engine.scheduler.running, *self.engine.scheduler.waiting):
            self.engine.abort(request)

    def _step(self) -> None:
        emissions, _ = self.engine.step()
        for emission in emissions:
            inbox = self._inboxes.get(emission.request.id)
            if inbox is not None:
                inbox.append(emission)

    def _apply(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's authors and may raise anything
            raise RequestError(f"the chat template refused these messages ({error}): check roles and order") from error
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _many(self, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, Mapping))):
            return [prompts]  # type: ignore[list-item]
        return list(prompts)  # type: ignore[arg-type]

    def _requests(self, prompt: tuple[int, ...], params: SamplingParams) -> list[Request]:
        target = self.engine.target
        room = self.resolved.max_context - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.resolved.max_context}: shorten it"
            )
        params = replace(params, bad_words=self._encode_bad_words(params.bad_words))
        seed = secrets.randbits(63) if params.seed is None else params.seed
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else target.eos_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        return [
            Request(next(self._ids), prompt, params, seed, sample, end_ids=ends, limit=limit)
            for sample in range(params.n)
        ]

    def _encode_bad_words(self, bad_words: Sequence[str | tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Texts become the token sequences that say them, at the start of a word and within one."""
        sequences: list[tuple[int, ...]] = []
        for words in bad_words:
            if isinstance(words, str):
                forms = [words, " " + words]
                sequences += [tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in forms]
            else:
                sequences.append(tuple(words))
        return tuple(dict.fromkeys(sequences))

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _stream_of(self, request: Request) -> TextStream:
        return TextStream(self._decode, request.params.stop, request.params.min_tokens)

    def _result(self, request: Request, stream: TextStream | None) -> Result:
        params, resolved = request.params, self.resolved
        assert request.finish_reason is not None
        return Result(
            text=stream.text if stream is not None else self._decode(request.output),
            token_ids=tuple(request.output),
            finish_reason=str(request.finish_reason),
            seed=request.seed,
            exactness=self.engine.target.exactness if params.temperature == 0 else resolved.exactness,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.num_cached or 0,
            logprobs=None if params.logprobs is None else tuple(request.logprobs),
            prompt_logprobs=None if params.prompt_logprobs is None else tuple(request.prompt_logprobs),
            tally=request.tally,
            drafter=resolved.drafter,
            error=None if request.error is None else str(request.error),
        )
