"""The offline front door: prompts in, results out; speculation decides only how soon they come."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from outrider.config import EngineConfig
from outrider.engine.ends import Emission
from outrider.engine.prompts import Prompt, Prompts, is_iterable
from outrider.engine.resolve import assemble
from outrider.engine.resolved import Resolved
from outrider.engine.step import Engine
from outrider.engine.text import TextStream
from outrider.errors import RequestError
from outrider.record import Record
from outrider.request import Request, SamplingParams
from outrider.result import Delta, Result

Ask = tuple[Any, Prompt, SamplingParams]
"""A request to come: a tag that its results carry, its prompt and its params."""
Watch = Callable[[Sequence[Emission], Record], None]
"""Is told of every pass, as soon as it is over: what it delivered, and its record."""
LEVELS = 4
"""Of guesses that are made in every cycle, where control may choose any depth."""


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
        progress: called with a stage of loading ("weights", "layers"), what is done and the total.
        settings: any field of `EngineConfig`. With `tensor_parallel` it returns on the first process of `torchrun`
            alone; the others serve that one, and end with it.

    Raises:
        ConfigError, ModelError, KernelError, CapacityError, RankError: one sentence each, with the remedy. SystemExit:
            on other processes than the first, when the job is over.
    """

    def __init__(self, model: str, *, progress: Callable[[str, int, int], None] | None = None, **settings: Any) -> None:
        self.config = EngineConfig.of(model=model, **settings)
        self.engine: Engine
        self.resolved: Resolved
        self.engine, self.resolved = assemble(self.config, progress)
        self.tokenizer = self.engine.target.tokenizer
        self.prompts = Prompts(self.tokenizer, self.engine.target.vocab_size)
        self._ids = itertools.count()
        self._inboxes: dict[int, deque[Emission]] = {}  # of streams that are being read
        self._dropped: deque[Request] = deque()  # to be aborted as soon as no step is under way
        self._lock = threading.Lock()  # held while the engine's books change

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        raw: bool = False,
        watch: Watch | None = None,
    ) -> list[Result]:
        """All samples of all prompts, prompt by prompt, decoded together.

        Args:
            prompts: one or many. params: for all of them, or one each.
            raw: leave texts as they are instead of putting them through the model's chat template.
            watch: for whoever measures.

        Raises:
            RequestError: where a prompt or its params cannot be honoured exactly; nothing was generated then.
        """
        many = self.prompts.many(prompts)
        each = list(params) if is_iterable(params) else [params] * len(many)  # type: ignore[arg-type]
        if len(each) != len(many):
            raise RequestError(f"{len(each)} params for {len(many)} prompts: give one for all, or one each")
        requests = [
            request
            for prompt, param in zip(many, each, strict=True)
            for request in self.requests(self.encode(prompt, raw), _checked(param))
        ]
        streams = [self._stream_of(request) if request.params.stop else None for request in requests]
        try:
            with self._lock:
                for request, stream in zip(requests, streams, strict=True):
                    self.engine.add(request, stream)
            while any(not request.is_finished for request in requests):
                self.advance(requests, watch)
        finally:
            self._drop(requests)
        return [self.result(request, stream) for request, stream in zip(requests, streams, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, raw: bool = False) -> Iterator[Delta]:
        """One prompt's text as it comes, a delta a cycle; closing the iterator early frees its slots.

        Several streams, and calls of `generate` beside them, share their passes: nobody misses what another's step
        brought.
        """
        params = _checked(params)
        if params.n != 1:
            raise RequestError(f"n={params.n} cannot be streamed: stream one sample, or use generate")
        (request,) = self.requests(self.encode(prompt, raw), params)
        inbox: deque[Emission] = deque()
        stream = self.begin(request, inbox)
        try:
            while inbox or not request.is_finished:
                if not inbox:
                    self.advance([request])
                    continue
                emission = inbox.popleft()
                result = self.result(request, stream) if request.is_finished and not inbox else None
                yield Delta(emission.text, emission.tokens, emission.num_accepted, result)
        finally:
            self.end(request)

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
                    for request in self.requests(self.encode(prompt, raw), _checked(params)):
                        stream = self._stream_of(request) if request.params.stop else None
                        with self._lock:
                            self.engine.add(request, stream)
                        running[request.id] = (tag, request, stream)
                if not running:
                    return
                self.advance([request for _, request, _ in running.values()])
                for number in [number for number, (_, request, _) in running.items() if request.is_finished]:
                    tag, request, stream = running.pop(number)
                    yield tag, self.result(request, stream)
        finally:
            self._drop([request for _, request, _ in running.values()])

    def always_guessing(
        self, depth: int | None = None, width: int | None = None, apart: bool = False
    ) -> AbstractContextManager[None]:
        """For tests and measurements: within this block every decode pass guesses, whether that pays or not.

        depth: levels of each guess (None: the engine's own where it is not adaptive, else 4). width: most children of
        one node (None: as many as the engine has). apart: control learns nothing from it.
        """
        control = self.engine.control
        if depth is None:
            depth = LEVELS if control.adaptive else control.depth
        return self.engine.always_guessing(depth, width, apart)

    def encode(self, prompt: Prompt, raw: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Token ids of a prompt, as `Prompts.encode`.

        Raises:
            RequestError: for an empty prompt, ids outside the vocabulary, or messages without a template.
        """
        return self.prompts.encode(prompt, raw, tools)

    def describe(self) -> dict[str, Any]:
        """What was found at start and decided from it, as plain data."""
        return self.resolved.to_json()

    def close(self) -> None:
        """Give up what still runs; memory returns with the object."""
        self._drop((*self.engine.scheduler.running, *self.engine.scheduler.waiting))

    def begin(self, request: Request, inbox: deque[Emission]) -> TextStream:
        """Queue a request of `requests`; whoever steps puts what it brings into `inbox`, until `end`.

        Raises:
            RequestError: where a sampling field cannot be honoured exactly.
        """
        stream = self._stream_of(request)
        with self._lock:
            self.engine.add(request, stream)
            self._inboxes[request.id] = inbox
        return stream

    def end(self, request: Request) -> None:
        """Nobody reads this request any more: if it still runs, its slots return before the next step."""
        self._inboxes.pop(request.id, None)
        self._drop([request])

    def advance(self, wanted: Sequence[Request], watch: Watch | None = None) -> Record | None:
        """One cycle and its record; None where another thread's has ended the wanted requests, or filled their inboxes,
        by now.
        """
        with self._lock:
            if all(request.is_finished or self._inboxes.get(request.id) for request in wanted):
                return None
            emissions, record = self.engine.step()
            if watch is not None:
                watch(emissions, record)
            fault = self.engine.fault
            if fault is not None and str(fault) not in self.resolved.notes:
                self.resolved = replace(self.resolved, notes=(*self.resolved.notes, str(fault)))
            for emission in emissions:
                inbox = self._inboxes.get(emission.request.id)
                if inbox is not None:
                    inbox.append(emission)
        self._drop(())
        return record

    def _drop(self, requests: Iterable[Request]) -> None:
        """Abort what still runs; in the middle of a step, which may collect a forgotten stream, just after it."""
        self._dropped.extend(requests)
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    self.engine.abort(self._dropped.popleft())
            finally:
                self._lock.release()

    def requests(
        self, prompt: tuple[int, ...], params: SamplingParams, client: str = "", priority: int = 0
    ) -> list[Request]:
        """One request a sample, not yet queued; clients share the engine, and larger numbers yield to smaller ones.

        Raises:
            RequestError: the context cannot hold the prompt.
        """
        target = self.engine.target
        room = self.resolved.max_context - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.resolved.max_context}: shorten it"
            )
        params = replace(params, bad_words=self.prompts.bad_words(params.bad_words))
        seed = secrets.randbits(63) if params.seed is None else params.seed
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else target.eos_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        return [
            Request(next(self._ids), prompt, params, seed, sample, ends, limit, client, priority)
            for sample in range(params.n)
        ]

    def _stream_of(self, request: Request) -> TextStream:
        return TextStream(self.prompts.decode, request.params.stop, request.params.min_tokens)

    def result(self, request: Request, stream: TextStream | None) -> Result:
        """What a finished request brought; `stream` where its text was wanted as it came."""
        params, resolved = request.params, self.resolved
        assert request.finish_reason is not None
        ended = bool(request.output) and request.output[-1] in request.end_ids
        said = request.output[:-1] if ended else request.output
        return Result(
            text=stream.text if stream is not None else self.prompts.decode(said),
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
