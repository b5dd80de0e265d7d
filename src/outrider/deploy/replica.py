"""A server as one of several: it answers what the door of the deployment hands it, and tells how it is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import ASGIApp, Message

from outrider.deploy.relay import Ask, Pin, Taken
from outrider.errors import OutriderError
from outrider.server.logs import tell_all
from outrider.server.settings import ServeConfig

LAST_WORDS = 5.0
"""Seconds that an application gets to end once nobody waits for its answer."""


class Hosted(Protocol):
    """What a replica serves: an application of ASGI, and what there is to know of it."""

    app: ASGIApp

    def is_alive(self) -> bool: ...

    def num_open(self) -> int:
        """Samples that run or wait."""

    def metrics(self) -> bytes:
        """Its figures, as Prometheus reads them."""

    def rates(self) -> tuple[float, float]:
        """Samples a second, lately: those that came in time, and all that ended."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a replica is."""

    server: str
    is_alive: bool
    num_open: int
    metrics: bytes


class Replica:
    """The class of the deployment of servers.

    Args:
        make: opens what is served. name: what this replica is called.
    """

    def __init__(self, make: Callable[[], Hosted], name: Callable[[], str]) -> None:
        self.name = name()
        self.hosted = make()

    async def answer(self, ask: Ask) -> AsyncGenerator[Taken | list[Message], None]:
        """Say that a request is here, and then its answer."""
        yield Taken(self.name)
        async with contextlib.aclosing(answered(self.hosted.app, ask)) as messages:
            async for some in messages:
                yield some

    async def report(self, _: Pin | None = None) -> Report:
        """How this replica is."""
        hosted = self.hosted
        return Report(self.name, hosted.is_alive(), hosted.num_open(), hosted.metrics())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray Serve hands to `policy.Autoscale`."""
        good, ended = self.hosted.rates()
        return {"good": good, "ended": ended}

    def check_health(self) -> None:
        """Ray Serve starts another replica where this raises."""
        if not self.hosted.is_alive():
            raise OutriderError("the engine's thread has ended: its log says why, and another server takes its place")


async def answered(app: ASGIApp, ask: Ask) -> AsyncGenerator[list[Message], None]:
    """The messages by which an application answers, as many at a time as there are.

    Whoever closes it early is, to the application, a client that left.
    """
    said: asyncio.Queue[Message | None] = asyncio.Queue()
    left, bodies = asyncio.Event(), [ask.body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        said.put_nowait(message)

    async def run() -> None:
        try:
            await app({"type": "http", "asgi": {"version": "3.0"}, **ask.scope}, receive, send)
        except Exception:  # the border: a server of ASGI would log it and close the connection
            logging.getLogger("outrider").exception("an answer broke off")
        finally:
            said.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        while (message := await said.get()) is not None:
            some = [message]
            while not said.empty() and (message := said.get_nowait()) is not None:
                some.append(message)
            yield some
            if message is None:
                return
    finally:
        left.set()
        await asyncio.wait([running], timeout=LAST_WORDS)
        running.cancel()


class HostedServer:
    """The server of `outrider serve`, without its port."""

    def __init__(self, model: str, engine: dict[str, Any], config: ServeConfig) -> None:
        from outrider import LLM
        from outrider.models.fetch import ALIASES, fetch
        from outrider.server.app import create_app
        from outrider.server.service import Server

        tell_all()
        if model in ALIASES:
            fetch(model)
        self.server = Server.of(LLM(model, **engine), config)
        self.app: ASGIApp = create_app(self.server)
        self.server.bridge.start()

    def is_alive(self) -> bool:
        return self.server.bridge.is_alive

    def num_open(self) -> int:
        return self.server.bridge.num_open

    def metrics(self) -> bytes:
        return self.server.metrics.text()

    def rates(self) -> tuple[float, float]:
        return self.server.metrics.goodput.rates()
