"""Which server should get a request: one that has read its beginning before, among those that are not too busy."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

BLOCK = 256
"""Characters of a text that are known or not known together."""
MOST_BLOCKS = 64
"""Of one text; what lies behind them decides nothing."""
MOST_KNOWN = 65536
"""Beginnings that are remembered, the ones asked for last."""
SLACK = 1.25
"""How many times the mean load a server may get for the sake of what it has read."""

Digests = tuple[int, ...]


def digests(path: str, body: bytes) -> Digests:
    """One number for each beginning of a request's text, shortest first; none of a body that says no text.

    Args:
        path: the route, of OpenAI's. body: its JSON; whatever is wrong with it is told by the server that gets it.
    """
    try:
        ask = json.loads(body)
        text = _text(ask, "chat" in path) if isinstance(ask, dict) else ""
    except (ValueError, RecursionError):
        return ()
    found: list[int] = []
    last = b""
    for start in range(0, min(len(text) // BLOCK, MOST_BLOCKS) * BLOCK, BLOCK):
        piece = text[start : start + BLOCK].encode("utf-8", "surrogatepass")
        last = hashlib.blake2b(last + piece, digest_size=8).digest()
        found.append(int.from_bytes(last))
    return tuple(found)


def _text(ask: Mapping[str, Any], is_chat: bool) -> str:
    """What the server will read, as far as it tells requests apart; a conversation goes on from what it was."""
    most = BLOCK * MOST_BLOCKS
    if is_chat:
        tools, messages = ask.get("tools"), ask.get("messages")
        parts = [json.dumps(tools)] if tools else []
        parts += [json.dumps(message) for message in messages] if isinstance(messages, list) else []
        return "\n".join(parts)
    prompt = ask.get("prompt")
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # of several prompts the first speaks for all
    if isinstance(prompt, list):
        return " ".join(str(token) for token in islice(prompt, most))
    return prompt if isinstance(prompt, str) else ""


class Places:
    """Who has read what, and who is how busy; any thread may use it.

    A request goes to the server that knows most of its beginning, unless that server then had more than `SLACK` times
    the mean load (consistent hashing with bounded loads, Mirrokni et al., arXiv:1608.01350, with what was truly sent in
    the place of the hash). Among those that know equally much the least busy one gets it, or whose turn is longest ago.
    """

    def __init__(self) -> None:
        self._readers: OrderedDict[int, dict[str, None]] = OrderedDict()
        self._open: Counter[str] = Counter()
        self._last: dict[str, int] = {}  # when each got a request last, by turns
        self._turns = itertools.count(1)
        self._lock = threading.Lock()

    def rank(self, asked: Sequence[int], servers: Collection[str], avoid: Collection[str] = ()) -> list[str]:
        """All `servers`, the best one first; those to `avoid` last."""
        with self._lock:
            known: Counter[str] = Counter()
            for digest in asked:
                known.update(tuple(self._readers.get(digest, ())))
            for gone in [server for server, count in self._open.items() if server not in servers and not count]:
                del self._open[gone]
                self._last.pop(gone, None)
            total = sum(self._open[server] for server in servers)
            most = math.ceil(SLACK * (total + 1) / max(1, len(servers)))

            def order(server: str) -> tuple[bool, bool, int, int, int]:
                load = self._open[server]
                fits = load < most
                return server in avoid, not fits, -known[server] if fits else 0, load, self._last.get(server, 0)

            return sorted(servers, key=order)

    def read(self, asked: Sequence[int], server: str) -> None:
        """A server has got a request."""
        with self._lock:
            for digest in asked:
                self._readers.setdefault(digest, {})[server] = None
                self._readers.move_to_end(digest)
            while len(self._readers) > MOST_KNOWN:
                self._readers.popitem(last=False)

    def began(self, server: str) -> None:
        """A request is on its way to a server."""
        with self._lock:
            self._open[server] += 1
            self._last[server] = next(self._turns)

    def ended(self, server: str) -> None:
        """A request of a server is over, however it ended."""
        with self._lock:
            self._open[server] = max(0, self._open[server] - 1)

    def load(self, server: str) -> int:
        """Requests that a server has now."""
        return self._open[server]
