"""The application: OpenAI's routes and ours over one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from outrider import __version__
from outrider.errors import OutriderError
from outrider.server import openapi
from outrider.server.bridge import LAST_PASS, closing
from outrider.server.chat import ChatAnswer
from outrider.server.completion import CompletionAnswer
from outrider.server.errors import ApiError, of_error, of_validation
from outrider.server.gate import Gate
from outrider.server.protocol import Ask, ChatAsk, CompletionAsk, DetokenizeAsk, TokenizeAsk
from outrider.server.service import Server
from outrider.server.stream import ClientLeft

PAGE = Path(__file__).parent / "page"
POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""The page asks nobody but the server that it came from."""


def create_app(server: Server) -> FastAPI:
    """The ASGI application; its lifespan is the engine thread's."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.bridge.start()
        yield
        await asyncio.get_running_loop().run_in_executor(None, server.bridge.close, LAST_PASS)
        server.tokenizing.shutdown(wait=False)

    app = FastAPI(title="Outrider", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _errors(app)
    _openai(app, server)
    _own(app, server)
    if server.config.allow_origin is not None:
        app.add_middleware(
            CORSMiddleware, allow_origins=[server.config.allow_origin], allow_methods=["*"], allow_headers=["*"]
        )
    config = server.config
    app.add_middleware(Gate, keys=config.keys(), max_body=config.max_body, requests=server.metrics.requests)
    if config.page:
        _page(app)
    return app


def _errors(app: FastAPI) -> None:
    """Every refusal in one shape."""

    def respond(error: ApiError, more: Mapping[str, str] = MappingProxyType({})) -> JSONResponse:
        return JSONResponse(error.body(), error.status, {**more, **error.headers()})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        body = getattr(request.scope.get("route"), "body_field", None)
        known = list(body.field_info.annotation.model_fields) if body is not None else []
        return respond(of_validation(list(error.errors()), known))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        said = {
            400: "the body cannot be read: send JSON in UTF-8, not hundreds deep, and no number of thousands of digits",
            404: "there is nothing at this path",
            405: "this path does not take this method",
        }
        refusal = ApiError(error.status_code, said.get(error.status_code, str(error.detail)))
        return respond(refusal, error.headers or {})

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

    @app.post("/v1/completions", responses=openapi.completion(), response_model=None)
    async def completions(ask: CompletionAsk, request: Request) -> Response:
        prepared = await server.prepare(request, server.preparer.completion, ask)
        return await server.answer(
            request, ask, prepared, lambda p: CompletionAnswer(server.voice, p, _wants_usage(ask), bool(ask.echo))
        )

    @app.post("/v1/chat/completions", responses=openapi.chat(), response_model=None)
    async def chat(ask: ChatAsk, request: Request) -> Response:
        prepared = await server.prepare(request, server.preparer.chat, ask)
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

    @app.get("/v1/models", responses=openapi.models(), response_model=None)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}", responses=openapi.model(), response_model=None)
    async def model(name: str) -> dict[str, Any]:
        server.preparer.check_model(name)
        return card()


def _own(app: FastAPI, server: Server) -> None:
    """Routes that OpenAI does not have."""

    @app.post("/tokenize", responses=openapi.tokens(), response_model=None)
    async def tokenize(ask: TokenizeAsk, request: Request) -> dict[str, Any]:
        server.preparer.check_model(ask.model)
        if ask.prompt is not None:
            tokens = await server.prepare(request, server.preparer.text, ask.prompt, ask.add_special_tokens)
        else:
            tokens = list(await server.prepare(request, server.preparer.messages, ask.messages))
        return {"tokens": tokens, "count": len(tokens), "max_model_len": server.llm.resolved.max_context}

    @app.post("/detokenize", responses=openapi.prompt(), response_model=None)
    async def detokenize(ask: DetokenizeAsk, request: Request) -> dict[str, Any]:
        server.preparer.check_model(ask.model)
        return {"prompt": await server.prepare(request, server.preparer.back, ask.tokens)}

    @app.get("/health", responses=openapi.health())
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if server.bridge.is_alive else _unavailable()

    @app.get("/ready", responses=openapi.ready())
    async def ready() -> Response:
        serving = server.bridge.is_alive and not server.bridge.is_closing
        return JSONResponse({"status": "ready", "open": server.bridge.num_open}) if serving else _unavailable()

    @app.get("/metrics", responses=openapi.refusals(401), response_class=PlainTextResponse)
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
