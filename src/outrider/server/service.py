"""The parts of a running server, and how one request goes through them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.server.answer import Answer, Voice
from outrider.server.bridge import Bridge
from outrider.server.goodput import Goodput
from outrider.server.job import Job
from outrider.server.metrics import Metrics
from outrider.server.pacing import Pacer
from outrider.server.prepare import Prepared, Preparer
from outrider.server.protocol import Ask
from outrider.server.settings import ServeConfig
from outrider.server.stream import EventStream, until_gone
from outrider.server.tokens import TokenNames
from outrider.server.turns import Turns

LARGE = 2000
"""Log-probabilities in an answer from which on it is written beside the event loop, which others wait for."""


@dataclass(frozen=True, slots=True)
class Server:
    """The parts of a running server.

    Attributes:
        tokenizing: the thread that tokenizes and compiles grammars. turns: who may use it.
    """

    llm: LLM
    config: ServeConfig
    name: str
    metrics: Metrics
    bridge: Bridge
    preparer: Preparer
    voice: Voice
    tokenizing: ThreadPoolExecutor
    turns: Turns

    @classmethod
    def of(cls, llm: LLM, config: ServeConfig) -> Server:
        """Put a server together; it begins with its application's lifespan."""
        name = config.served_name or llm.config.model
        metrics = Metrics(name, llm.resolved.drafter, Goodput(config.good_first_token, config.good_token))
        metrics.memory(llm.resolved.memory.to_json())
        preparer = Preparer(llm, config, name)
        voice = Voice(name, _fingerprint(llm), llm.resolved.drafter, _names(preparer), _special(llm))
        pool = ThreadPoolExecutor(1, "tokenizer")
        return cls(llm, config, name, metrics, Bridge(llm, metrics, config.max_queue), preparer, voice, pool, Turns())

    async def prepare(self, request: Request, make: Callable[..., Any], *arguments: Any) -> Any:
        """Run `make` beside the event loop, when it is the turn of the request's client.

        Raises:
            ApiError: 429, more of this client's wait for that than could run or wait behind it.
            ClientLeft: it has left before its turn.
        """
        client = request.scope["state"]["client"]
        if self.turns.num_waiting(client) >= self.bridge.lobby.most:
            raise self.bridge.full("try again later")
        return await until_gone(request.receive, self._in_turn(client, make, *arguments))

    async def _in_turn(self, client: str, make: Callable[..., Any], *arguments: Any) -> Any:
        async with self.turns.turn(client):
            work = asyncio.get_running_loop().run_in_executor(self.tokenizing, make, *arguments)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:  # the thread goes on, and nobody else's turn begins before its end
                await asyncio.wait([work])
                raise

    async def answer(
        self, request: Request, ask: Ask, prepared: Prepared, make: Callable[[Prepared], Answer]
    ) -> Response:
        """Run a job to its end, whole or as a stream."""
        limits = [s for s in (ask.timeout, self.config.request_timeout) if s is not None]
        state = request.scope["state"]
        arrived, client = state["arrived"], state["client"]
        deadline = arrived + min(limits) if limits else None
        job = Job(prepared.prompts, prepared.params, deadline, client, ask.priority or 0, arrived)
        answer, facts = make(prepared), state["facts"]
        facts |= {"seed": prepared.seed, "stream": bool(ask.stream)} | ({"user": ask.user} if ask.user else {})

        def end() -> None:
            self.bridge.give_up(job)
            facts.update(_told(job, answer))

        self.bridge.submit(job)
        try:
            if ask.stream:
                # A refusal of the engine's comes before the first piece, while there is a status to give.
                first = await until_gone(request.receive, anext(job))
                pieces = Pacer(job, first, bool(ask.stream_smoothing), self.voice.names)
                return EventStream(_events(answer, pieces), end)
            await until_gone(request.receive, _collect(answer, job))
        except BaseException:
            end()
            raise
        end()
        if answer.num_told < LARGE:
            return JSONResponse(answer.whole())
        return await asyncio.to_thread(lambda: JSONResponse(answer.whole()))


async def _collect(answer: Answer, job: Job) -> None:
    async for piece in job:
        answer.take(piece)


async def _events(answer: Answer, pieces: Pacer) -> AsyncIterator[dict[str, Any]]:
    for event in answer.opening():
        yield event
    async for piece in pieces:
        for event in answer.chunks(piece):
            yield event
    for event in answer.closing():
        yield event


def _told(job: Job, answer: Answer) -> dict[str, Any]:
    """What the log tells of a job."""
    usage = answer.usage()
    facts: dict[str, Any] = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    speculation = usage["speculation"]
    facts |= {name: speculation[name] for name in ("drafter", "cycles", "drafted", "accepted", "tau", "speed_up")}
    facts["finish_reasons"] = [result.finish_reason for result in answer.results]
    if job.first_token is not None:
        facts["first_token_seconds"] = round(job.first_token - job.arrived, 4)
    return facts


def _fingerprint(llm: LLM) -> str:
    """The same for answers that the same seed must repeat."""
    resolved = llm.resolved
    facts = [resolved.model, resolved.way, resolved.dtype, resolved.device, resolved.kernels, resolved.versions]
    return "fp_" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _special(llm: LLM) -> frozenset[int]:
    """Tokens that a text leaves out."""
    return frozenset(llm.tokenizer.all_special_ids)


def _names(preparer: Preparer) -> TokenNames:
    """Token bytes as the grammars' library reads them; of a tokenizer that it cannot read, the decoder's text."""
    try:
        return TokenNames(preparer.grammars.token_bytes)
    except OutriderError:
        tokenizer = preparer.llm.tokenizer
        return TokenNames(lambda token: tokenizer.decode([token]).encode())
