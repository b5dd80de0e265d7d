"""Server-sent events, and noticing at once that a client has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.server.errors import of_error

DONE = "[DONE]"
LINE_ENDS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}
"""What many a client takes for the end of a line, and JSON leaves as it is: told by number, which reads the same."""
T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Wait for work, but not longer than its client does.

    Raises:
        ClientLeft: it has left; the work was cancelled.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """An answer of server-sent events; whatever becomes of it, `on_end` is called.

    Args:
        events: JSON objects; what it raises becomes a last event in OpenAI's shape of an error.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events = events
        self.on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_gone(receive, self._write(send))
            await send({"type": "http.response.body", "body": b""})
        except ClientLeft:
            scope["state"]["facts"]["client_left"] = True
        finally:
            self.on_end()

    async def _write(self, send: Send) -> None:
        try:
            async for event in self.events:
                await _put(send, json.dumps(event, ensure_ascii=False, allow_nan=False).translate(LINE_ENDS))
            await _put(send, DONE)
        except Exception as error:  # the border: what is told is one sentence
            await _put(send, json.dumps(of_error(error).body()))


async def _put(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
