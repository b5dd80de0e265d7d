"""What every request passes first: an id, a key, a bound on its body; and its one line in the log."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import Counter
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.errors import ApiError, of_error
from outrider.server.logs import tell

OPEN_PATHS = ("/health", "/ready", "/")
"""Asked by whoever watches over a server, who has no key; and the page, which is told its key by a person."""
OPEN_FOLDER = "/page/"
BODY_SECONDS = 60.0
"""A body that takes longer is no longer waited for."""
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """ASGI middleware around the application.

    Args:
        keys: none: anyone may ask. max_body: bytes. requests: counts answers by route and status.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[bytes], max_body: int, requests: Counter) -> None:
        self.app = app
        self.keys = tuple(keys)
        self.max_body = max_body
        self.requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        said = headers.get("x-request-id", b"").decode("latin-1")
        number = said if REQUEST_ID.fullmatch(said) else uuid.uuid4().hex
        facts: dict[str, Any] = {"request_id": number, "method": scope["method"], "path": scope["path"]}
        state = scope.setdefault("state", {})
        state["facts"] = facts
        began, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", number.encode())]
            await send(message)

        try:
            if scope["method"] != "OPTIONS":  # a browser asks whether it may ask without telling its key
                state["client"] = facts["client"] = self._admit(scope["path"], headers) or _address(scope)
            whole = await self._bounded(headers, receive)
            state["arrived"] = time.monotonic()
            await self.app(scope, whole, answer)
        except Exception as error:  # the border: whatever it was, the client gets one sentence
            refusal = of_error(error)
            if refusal.status == 500:
                logging.getLogger("outrider").error("request %s failed", number, exc_info=error)
            if not status:
                await JSONResponse(refusal.body(), refusal.status, refusal.headers())(scope, receive, answer)
        finally:
            facts |= {"status": status, "seconds": round(time.monotonic() - began, 4)}
            self.requests.labels(_route(scope), str(status)).inc()
            tell(f"{scope['method']} {scope['path']} {status}", facts)

    def _admit(self, path: str, headers: dict[str, bytes]) -> str | None:
        """Refuse whoever brings no known key; every key is compared, whole, so that no time tells of one.

        Returns which key it was, by its place in the file and not by itself; None where none is needed.
        """
        if not self.keys or path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return None
        kind, _, key = headers.get("authorization", b"").partition(b" ")
        known = [hmac.compare_digest(key.strip(), one) for one in self.keys]
        if kind.lower() != b"bearer" or not any(known):
            raise ApiError(
                401, "the API key is missing or unknown: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
        return f"key {known.index(True) + 1}"

    async def _bounded(self, headers: dict[str, bytes], receive: Receive) -> Callable[[], Awaitable[Message]]:
        """The whole body, read within its bounds, and then what follows it."""
        length = headers.get("content-length", b"0")
        if not length.isdigit() or int(length) > self.max_body:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > self.max_body:
                        raise self._too_large()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        except TimeoutError as error:
            raise ApiError(408, f"the body was not there after {BODY_SECONDS:.0f} s: send it at once") from error
        waiting = [message if message["type"] == "http.disconnect" else {"type": "http.request", "body": bytes(body)}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        return replay

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.max_body} bytes: send less", code="body_too_large")


def _address(scope: Scope) -> str:
    """Where a request comes from; of IPv6 the network, as whoever has one address of it has all."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a socket's path, or nothing
        return str(host)
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


def _route(scope: Scope) -> str:
    """The path's pattern, so that paths that do not exist make no labels."""
    route = scope.get("route")
    return str(getattr(route, "path", "none"))
