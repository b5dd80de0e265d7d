"""The offline front door: prompts in, results out; speculation decides only how soon they come."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from numbers import Integral
from typing import Any

from outrider.config import EngineConfig
from outrider.engine.ends import Emission
from outrider.engine.resolve import Resolved, assemble
from outrider.engine.step import Engine
from outrider.engine.text import TextStream
from outrider.errors import RequestError
from outrider.request import Request, SamplingParams
from outrider.result import Delta, Result

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a conversation (`role`, `content`)."""
Ask = tuple[Any, Prompt, SamplingParams]
"""A request to come: a tag that its results carry, its prompt and its params."""


def _is_iterable(value: Any) -> bool:
    """Whether it holds several things: a text, bytes and one message do not."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def _items(value: Any) -> list[Any]:
    """Its items; an array's or a tensor's as Python's own numbers."""
    return list(value.tolist() if hasattr(value, "tolist") else value)


def _checked(params: Any) -> SamplingParams:
    """The default where None was given.

    Raises:
        RequestError: for anything else but `SamplingParams`.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params={params!r} are no SamplingParams: give SamplingParams(...), for all or one each")
    return params


class LLM:
    """A model with a drafter, ready to generate; threads may share it, and share its passes then.

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
        self._dropped: deque[Request] = deque()  # to be aborted as soon as no step is under way
        self._lock = threading.Lock()  # held while the engine's books change

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
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
        each = list(params) if _is_iterable(params) else [params] * len(many)  # type: ignore[arg-type]
        if len(each) != len(many):
            raise RequestError(f"{len(each)} params for {len(many)} prompts: give one for all, or one each")
        requests = [
            request
            for prompt, param in zip(many, each, strict=True)
            for request in self._requests(self.encode(prompt, raw), _checked(param))
        ]
        streams = [self._stream_of(request) if request.params.stop else None for request in requests]
        try:
            with self._lock:
                for request, stream in zip(requests, streams, strict=True):
                    self.engine.add(request, stream)
            while any(not request.is_finished for request in requests):
                self._step(requests)
        finally:
            self._drop(requests)
        return [self._result(request, stream) for request, stream in zip(requests, streams, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, raw: bool = False) -> Iterator[Delta]:
        """One prompt's text as it comes, a delta a cycle; closing the iterator early frees its slots.

        Several streams, and calls of `generate` beside them, share their passes: nobody misses what another's step
        brought.
        """
        params = _checked(params)
        if params.n != 1:
            raise RequestError(f"n={params.n} cannot be streamed: stream one sample, or use generate")
        (request,) = self._requests(self.encode(prompt, raw), params)
        stream = self._stream_of(request)
        inbox: deque[Emission] = deque()
        with self._lock:
            self.engine.add(request, stream)
            self._inboxes[request.id] = inbox
        try:
            while inbox or not request.is_finished:
                if not inbox:
                    self._step([request])
                    continue
                emission = inbox.popleft()
                result = self._result(request, stream) if request.is_finished and not inbox else None
                yield Delta(emission.text, emission.tokens, emission.num_accepted, result)
        finally:
            del self._inboxes[request.id]
            self._drop([request])

    def generate_from(
        self, source: Callable[[], Ask | None], raw: bool = False
    ) -> Generator[tuple[Any, Result], None, None]:
        """Results as they end, of requests that `source` hands out whenever one may begin: the engine is kept full.

        Args:
            source: gives the next tag, prompt and params, or None where there is nothing now; it is asked again after
                every result that was taken, so that one may lead to the next. The iterator ends when nothing runs and
                there is nothing. raw: as in `generate`.

        Yields:
            A request's tag and its result, one for each of its samples.

        Raises:
            RequestError: where a prompt or its params cannot be honoured exactly; what runs is given up then.
        """
        running: dict[int, tuple[Any, Request, TextStream | None]] = {}
        try:
            while True:
                while len(running) < self.config.max_requests and (ask := source()) is not None:
                    tag, prompt, params = ask
                    for request in self._requests(self.encode(prompt, raw), _checked(params)):
                        stream = self._stream_of(request) if request.params.stop else None
                        with self._lock:
                            self.engine.add(request, stream)
                        running[request.id] = (tag, request, stream)
                if not running:
                    return
                self._step([request for _, request, _ in running.values()])
                for number in [number for number, (_, request, _) in running.items() if request.is_finished]:
                    tag, request, stream = running.pop(number)
                    yield tag, self._result(request, stream)
        finally:
            self._drop([request for _, request, _ in running.values()])

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
            ids = self._apply([{"role": "user", "content": prompt}]) if templated else self._tokenize(prompt)
        elif not _is_iterable(prompt):
            raise RequestError(f"{prompt!r} is no prompt: give a text, token ids, or a list of messages")
        elif (items := _items(prompt)) and all(isinstance(message, Mapping) for message in items):
            if not self.tokenizer.chat_template:
                raise RequestError("this model has no chat template: give the prompt as one text")
            ids = self._apply([dict(message) for message in items])
        else:
            ids = items
        vocab_size = self.engine.target.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
                raise RequestError(f"prompt token {token!r} is no id of this model: ids lie in 0 .. {vocab_size - 1}")
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        bos = self.tokenizer.bos_token_id
        if bos is not None and list(ids[:2]) == [bos, bos]:
            raise RequestError(
                f"the prompt begins with two BOS tokens (id {bos}), which no model was trained on: "
                "leave the BOS out of the text, or out of the chat template"
            )
        return tuple(map(int, ids))

    def describe(self) -> dict[str, Any]:
        """What was found at start and decided from it, as plain data."""
        return self.resolved.to_json()

    def close(self) -> None:
        """Give up what still runs; memory returns with the object."""
        self._drop((*self.engine.scheduler.running, *self.engine.scheduler.waiting))

    def _step(self, wanted: Sequence[Request]) -> None:
        """One cycle, unless another thread's has ended the wanted requests, or brought a stream something, by now."""
        with self._lock:
            if all(request.is_finished or self._inboxes.get(request.id) for request in wanted):
                return
            emissions, _ = self.engine.step()
            fault = self.engine.fault
            if fault is not None and str(fault) not in self.resolved.notes:
                self.resolved = replace(self.resolved, notes=(*self.resolved.notes, str(fault)))
            for emission in emissions:
                inbox = self._inboxes.get(emission.request.id)
                if inbox is not None:
                    inbox.append(emission)
        self._drop(())

    def _drop(self, requests: Iterable[Request]) -> None:
        """Abort what still runs; in the middle of a step, which may collect a forgotten stream, just after it."""
        self._dropped.extend(requests)
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    self.engine.abort(self._dropped.popleft())
            finally:
                self._lock.release()

    def _apply(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's authors and may raise anything
            raise RequestError(f"the chat template refused these messages ({error}): check roles and order") from error
        return self._tokenize(text, add_special_tokens=False)

    def _tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"character {error.start} of a text is half a surrogate pair, which no tokenizer takes: repair the text"
            ) from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def _many(self, prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
        if not _is_iterable(prompts):  # one text, or what `encode` refuses
            return [prompts]  # type: ignore[list-item]
        items = _items(prompts)
        return [items] if items and isinstance(items[0], (Integral, Mapping)) else items

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
                sequences += [tuple(self._tokenize(form, add_special_tokens=False)) for form in forms]
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
        ended = bool(request.output) and request.output[-1] in request.end_ids
        said = request.output[:-1] if ended else request.output
        return Result(
            text=stream.text if stream is not None else self._decode(said),
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
