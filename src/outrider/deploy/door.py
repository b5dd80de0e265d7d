"""The one address of a deployment: it hands requests to servers, and tells how they are, one by one and together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from outrider.deploy.figures import Figures, Pool, apart
from outrider.deploy.relay import Answer, Ask, Relay
from outrider.deploy.replica import Report
from outrider.server.gate import Gate
from outrider.server.settings import ServeConfig

FRESH = 1.0
"""Seconds for which servers are not asked again how they are, whoever wants to know."""
KNOWN = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize")
"""Routes of the servers that are counted by name."""
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Servers(Protocol):
    """The servers behind a door."""

    def ask(self, ask: Ask) -> Answer:
        """Begin to ask one of them."""

    async def reports(self) -> list[Report]:
        """How those are that answer."""


class Door:
    """The application of the ingress.

    Args:
        config: of the servers; keys and the bound of a body hold here already.
    """

    def __init__(self, servers: Servers, config: ServeConfig, retries: int) -> None:
        self.figures = Figures()
        self._servers = servers
        self._pool = Pool()
        self._relay = Relay(servers.ask, retries, self.figures)
        self._reports: list[Report] = []
        self._asked = 0.0
        self._lock = asyncio.Lock()
        self._own: dict[str, Callable[[], Awaitable[Response]]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/metrics/replicas": self._metrics_apart,
        }
        self._gate = Gate(self._serve, config.keys(), config.max_body, self.figures.requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gate(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        own = self._own.get(path) if scope["method"] == "GET" else None
        if own or path in KNOWN:
            scope["route"] = SimpleNamespace(path=path)  # for the count by route
        if own:
            await (await own())(scope, receive, send)
        else:
            await self._relay(scope, receive, send)

    async def _fresh(self) -> list[Report]:
        """How the servers are, asked for at most once in `FRESH` seconds."""
        async with self._lock:
            if not self._asked or time.monotonic() - self._asked > FRESH:
                self._reports = await self._servers.reports()
                self._asked = time.monotonic()
                self.figures.servers.set(len(self._reports))
            return self._reports

    async def _health(self) -> Response:
        """Sound as long as one server is."""
        reports = await self._fresh()
        is_sound = any(report.is_alive for report in reports)
        body = {"status": "ok" if is_sound else "unavailable", "replicas": [_told(report) for report in reports]}
        return JSONResponse(body, 200 if is_sound else 503)

    async def _ready(self) -> Response:
        reports = [report for report in await self._fresh() if report.is_alive]
        body = {"status": "ready" if reports else "unavailable", "open": sum(r.num_open for r in reports)}
        return JSONResponse(body, 200 if reports else 503)

    async def _metrics(self) -> Response:
        told = {report.server: report.metrics for report in await self._fresh()}
        return Response(self.figures.text() + self._pool.pooled(told), media_type=PROMETHEUS)

    async def _metrics_apart(self) -> Response:
        return Response(apart({r.server: r.metrics for r in await self._fresh()}), media_type=PROMETHEUS)


def _told(report: Report) -> dict[str, str | int]:
    return {"replica": report.server, "status": "ok" if report.is_alive else "ended", "open": report.num_open}
