"""One request on its way to a server, and its answer on the way back; asked anew elsewhere if its server is lost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from outrider.deploy.figures import Figures
from outrider.deploy.prefix import Digests, digests
from outrider.server.errors import ApiError
from outrider.server.stream import ClientLeft, until_gone

GENERATING = ("/v1/completions", "/v1/chat/completions")
"""Paths whose requests have a beginning that a server may have read before."""
LARGE = 2**18
"""Bytes of a body from which on it is read beside the event loop, which others wait for."""
SERVED_BY = b"x-outrider-replica"
"""The header that tells which server answered."""
CARRIED = (
    "method",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
    "scheme",
    "http_version",
    "root_path",
)
"""Of an ASGI scope, what a server is told."""

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as a server gets it.

    Attributes:
        scope: what `CARRIED` names. digests: of its text's beginnings. avoid: names of servers that it was lost with.
    """

    scope: dict[str, Any]
    body: bytes
    digests: Digests = ()
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pin:
    """In the place of a request: something for one server and no other."""

    server: str


@dataclass(frozen=True, slots=True)
class Taken:
    """The first thing that a server says: that it has a request."""

    server: str


class Lost(Exception):
    """A server is gone, or cannot be reached, with a request that it had."""


class Absent(ApiError):
    """No server took a request."""

    def __init__(self, said: str) -> None:
        super().__init__(503, said, code="no_replica", retry_after=10)


Answer = AsyncGenerator["Taken | list[Message]", None]
"""What a server says of a request: that it has it, then its messages of ASGI, some at a time; raises Lost or Absent."""


@dataclass(slots=True)
class Progress:
    """How far an answer has got to its client: nothing of it may be said twice."""

    server: str = ""
    begun: Message | None = None
    has_sent: bool = False
    is_whole: bool = False
    lost_with: list[str] = field(default_factory=list)


class Relay:
    """Sends requests to servers.

    Args:
        ask: begins to ask a server. retries: servers that a request may be lost with and still be answered by another.
    """

    def __init__(self, ask: Callable[[Ask], Answer], retries: int, figures: Figures) -> None:
        self._ask = ask
        self._retries = retries
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose body comes as one message, as behind a Gate."""
        message = await receive()
        body = message.get("body", b"")
        asked: Digests = ()
        if scope["path"] in GENERATING:
            asked = (
                digests(scope["path"], body)
                if len(body) < LARGE
                else await asyncio.to_thread(digests, scope["path"], body)
            )
        number = scope["state"]["facts"]["request_id"].encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        carried = {name: scope[name] for name in CARRIED if name in scope}
        ask = Ask({**carried, "headers": [*headers, (b"x-request-id", number)]}, body, asked)
        progress = Progress()
        try:
            await until_gone(receive, self._answer(ask, send, progress))
        except ClientLeft:
            scope["state"]["facts"]["client_left"] = True
        finally:
            scope["state"]["facts"] |= {"replica": progress.server, "lost_with": progress.lost_with}

    async def _answer(self, ask: Ask, send: Send, progress: Progress) -> None:
        for _ in range(self._retries + 1):
            try:
                await self._once(replace(ask, avoid=tuple(progress.lost_with)), send, progress)
                return
            except Lost as lost:
                progress.lost_with.append(progress.server)
                logging.getLogger("outrider").warning("replica %s was lost with a request: %s", progress.server, lost)
                if progress.has_sent:
                    self._figures.broken.inc()
                    await _break_off(send, progress)
                    return
                self._figures.retried.inc()
        count = len(progress.lost_with)
        raise ApiError(
            503, f"{count} servers were lost with this request, one after the other: try again later", retry_after=10
        )

    async def _once(self, ask: Ask, send: Send, progress: Progress) -> None:
        """Ask one server, and hand on what it says."""
        progress.server, progress.begun, answer = "", None, self._ask(ask)
        try:
            async for said in answer:
                if isinstance(said, Taken):
                    progress.server = said.server
                    continue
                for message in said:
                    await _hand_on(message, send, progress)
        finally:
            await answer.aclose()
        if not progress.is_whole:
            raise Lost("its answer broke off")


async def _hand_on(message: Message, send: Send, progress: Progress) -> None:
    """Send a message on; an answer's head waits for its first piece, so that its server may be lost until then."""
    if message["type"] == "http.response.start":
        progress.begun = message
        return
    if not progress.has_sent:
        if progress.begun is None:
            raise Lost("its answer has no head")
        progress.has_sent = True
        own = [(name, value) for name, value in progress.begun["headers"] if name.lower() != b"x-request-id"]
        await send({**progress.begun, "headers": [*own, (SERVED_BY, progress.server.encode())]})
    progress.is_whole = not message.get("more_body", False)
    await send(message)


async def _break_off(send: Send, progress: Progress) -> None:
    """End an answer of which something was said: a stream with an event, anything else by closing the connection."""
    said = "the server of this answer was lost in the middle of it: what came before stands, ask again for the rest"
    headers: Headers = progress.begun["headers"] if progress.begun else ()
    if not any(name.lower() == b"content-type" and b"event-stream" in value for name, value in headers):
        raise ApiError(502, said)
    error = ApiError(502, said, code="replica_lost")
    data = f"data: {json.dumps(error.body())}\n\n".encode()
    await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
