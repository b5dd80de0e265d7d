"""The application: OpenAI's routes and ours over one engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.staticfiles import StaticFiles

from outrider import __version__
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.server.answer import Answer, Voice
from outrider.server.bridge import Bridge, closing
from outrider.server.chat import ChatAnswer
from outrider.server.completion import CompletionAnswer
from outrider.server.errors import ApiError, of_error, of_validation
from outrider.server.gate import Gate
from outrider.server.job import Job
from outrider.server.metrics import Metrics
from outrider.server.pacing import Pacer
from outrider.server.prepare import Prepared, Preparer
from outrider.server.protocol import Ask, ChatAsk, CompletionAsk, DetokenizeAsk, TokenizeAsk
from outrider.server.settings import ServeConfig
from outrider.server.stream import ClientLeft, EventStream, until_gone
from outrider.server.tokens import TokenNames

PAGE = Path(__file__).parent / "page"
POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""The page asks nobody but the server that it came from."""
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
    for status, text in {
        400: "Refused: a field is unknown, wrong, or cannot be honoured exactly.",
        401: "No known API key.",
        404: "Another model than the one here.",
        408: "The body did not come.",
        413: "The body is too large.",
        429: "The queue is full; Retry-After says when to try again.",
        500: "The model gave no law, or the server failed.",
        503: "The server is stopping, or out of memory.",
        504: "Not done in time.",
    }.items()
}


@dataclass(frozen=True, slots=True)
class Server:
    """The parts of a running server.

    Attributes:
        tokenizing: the thread that tokenizes and compiles grammars.
    """

    llm: LLM
    config: ServeConfig
    name: str
    metrics: Metrics
    bridge: Bridge
    preparer: Preparer
    voice: Voice
    tokenizing: ThreadPoolExecutor

    @classmethod
    def of(cls, llm: LLM, config: ServeConfig) -> Server:
        """Put a server together; it begins with its application's lifespan."""
        name = config.served_name or llm.config.model
        metrics = Metrics(name, llm.resolved.drafter)
        preparer = Preparer(llm, config, name)
        voice = Voice(name, _fingerprint(llm), llm.resolved.drafter, _names(preparer), _special(llm))
        pool = ThreadPoolExecutor(1, "tokenizer")
        return cls(llm, config, name, metrics, Bridge(llm, metrics, config.max_queue), preparer, voice, pool)

    async def prepare(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Run `make` beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.tokenizing, make, *arguments)

    async def answer(
        self, request: Request, ask: Ask, prepared: Prepared, make: Callable[[Prepared], Answer]
    ) -> Response:
        """Run a job to its end, whole or as a stream."""
        limits = [s for s in (ask.timeout, self.config.request_timeout) if s is not None]
        job = Job(prepared.prompts, prepared.params, time.monotonic() + min(limits) if limits else None)
        answer, facts = make(prepared), request.scope["state"]["facts"]
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
        return JSONResponse(answer.whole())


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


def create_app(server: Server) -> FastAPI:
    """The ASGI application; its lifespan is the engine thread's."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.bridge.start()
        yield
        await asyncio.get_running_loop().run_in_executor(None, server.bridge.close)
        server.tokenizing.shutdown(wait=False)

    app = FastAPI(title="Outrider", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _errors(app)
    _openai(app, server)
    _own(app, server)
    if server.config.allow_origin is not None:
        app.add_middleware(
            CORSMiddleware, allow_origins=[server.config.allow_origin], allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Gate, keys=server.config.keys(), max_body=server.config.max_body, metrics=server.metrics)
    if server.config.page:
        _page(app)
    return app


def _errors(app: FastAPI) -> None:
    """Every refusal in one shape."""

    def respond(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers())

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        body = getattr(request.scope.get("route"), "body_field", None)
        known = list(body.field_info.annotation.model_fields) if body is not None else []
        return respond(of_validation(list(error.errors()), known))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        said = {404: "there is nothing at this path", 405: "this path does not take this method"}
        return respond(ApiError(error.status_code, said.get(error.status_code, str(error.detail))))

    @app.exception_handler(ApiError)
    @app.exception_handler(OutriderError)
    async def refused(_: Request, error: Exception) -> JSONResponse:
        return respond(of_error(error))

    @app.exception_handler(ClientLeft)
    async def left(request: Request, _: ClientLeft) -> Response:
        request.scope["state"]["facts"]["client_left"] = True
        return Response(status_code=499)


def _openai(app: FastAPI, server: Server) -> None:
    """OpenAI's routes."""

    @app.post("/v1/completions", responses=REFUSALS, response_model=None)
    async def completions(ask: CompletionAsk, request: Request) -> Response:
        prepared = await server.prepare(server.preparer.completion, ask)
        return await server.answer(
            request, ask, prepared, lambda p: CompletionAnswer(server.voice, p, _wants_usage(ask), bool(ask.echo))
        )

    @app.post("/v1/chat/completions", responses=REFUSALS, response_model=None)
    async def chat(ask: ChatAsk, request: Request) -> Response:
        prepared = await server.prepare(server.preparer.chat, ask)
        return await server.answer(request, ask, prepared, lambda p: ChatAnswer(server.voice, p, _wants_usage(ask)))

    def card() -> dict[str, Any]:
        resolved = server.llm.resolved
        return {
            "id": server.name,
            "object": "model",
            "created": 0,
            "owned_by": "outrider",
            "exactness": resolved.exactness,
            "drafter": resolved.drafter,
            "depth": resolved.depth,
            "width": resolved.width,
            "acceptance": resolved.acceptance,
            "max_model_len": resolved.max_context,
        }

    @app.get("/v1/models", responses={401: REFUSALS[401]})
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}", responses={401: REFUSALS[401], 404: REFUSALS[404]})
    async def model(name: str) -> dict[str, Any]:
        server.preparer.check_model(name)
        return card()


def _own(app: FastAPI, server: Server) -> None:
    """Routes that OpenAI does not have."""

    @app.post("/tokenize", responses=REFUSALS)
    async def tokenize(ask: TokenizeAsk) -> dict[str, Any]:
        server.preparer.check_model(ask.model)
        if ask.prompt is not None:
            tokens = await server.prepare(server.llm.prompts.tokenize, ask.prompt, ask.add_special_tokens)
        else:
            tokens = list(await server.prepare(server.preparer.messages, ask.messages))
        return {"tokens": tokens, "count": len(tokens), "max_model_len": server.llm.resolved.max_context}

    @app.post("/detokenize", responses=REFUSALS)
    async def detokenize(ask: DetokenizeAsk) -> dict[str, Any]:
        server.preparer.check_model(ask.model)
        await server.prepare(server.llm.encode, ask.tokens)
        return {"prompt": server.llm.tokenizer.decode(ask.tokens)}

    @app.get("/health", responses={503: REFUSALS[503]})
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if server.bridge.is_alive else _unavailable()

    @app.get("/ready", responses={503: REFUSALS[503]})
    async def ready() -> Response:
        serving = server.bridge.is_alive and not server.bridge.is_closing
        return JSONResponse({"status": "ready", "open": server.bridge.num_open}) if serving else _unavailable()

    @app.get("/metrics", responses={401: REFUSALS[401]})
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _page(app: FastAPI) -> None:
    """The playground, which is a folder of this package."""
    app.mount("/page", StaticFiles(directory=PAGE))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html", headers=headers)


def _unavailable() -> JSONResponse:
    error = closing()
    return JSONResponse(error.body(), error.status, error.headers())


def _wants_usage(ask: Ask) -> bool:
    return ask.stream_options is not None and ask.stream_options.include_usage


def _told(job: Job, answer: Answer) -> dict[str, Any]:
    """What the log tells of a job."""
    usage = answer.usage()
    facts: dict[str, Any] = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    speculation = usage["speculation"]
    facts |= {name: speculation[name] for name in ("drafter", "cycles", "drafted", "accepted", "tau")}
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
