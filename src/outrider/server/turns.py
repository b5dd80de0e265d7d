"""Clients in turns at what only one can do at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A lock whose waiters are let in client by client, whoever came with more; of one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # whose turn is next, first

    def num_waiting(self, client: str) -> int:
        """Of one client's."""
        return len(self._lines.get(client, ()))

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn of this client's, and keep it within the block."""
        if self._is_taken:
            waiting = asyncio.get_running_loop().create_future()
            self._lines.setdefault(client, deque()).append(waiting)
            try:
                await waiting
            except asyncio.CancelledError:
                if waiting.done() and not waiting.cancelled():  # it was let in, and left in the same moment
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next one in; those that have left are passed over."""
        while self._lines:
            client, line = next(iter(self._lines.items()))
            del self._lines[client]
            waiting = line.popleft()
            if line:
                self._lines[client] = line  # at the end
            if not waiting.done():
                waiting.set_result(None)
                return
        self._is_taken = False
