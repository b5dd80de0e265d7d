"""Connections between rank 0 and each other rank, without a library in between: orders go one way, at once.

An order lies in the connection until it is heard: rank 0 waits for nobody, and the others find the next one when they
are done with the last.
"""

from __future__ import annotations

import secrets
import socket
from typing import Any

from outrider.errors import RankError

PATIENCE = 60.0
"""Seconds in which all others must come."""
_HEAD = 8
"""Bytes that tell how long an order is."""


def connect(rank: int, size: int, store: Any, address: str, purpose: str) -> dict[int, socket.socket]:
    """One connection with each other rank, on rank 0; elsewhere the one with rank 0.

    Args:
        store: PyTorch's, where rank 0 says how it is reached. address: rank 0's host.

    Raises:
        RankError: if the others do not come.
    """
    return _receive(size, store, address, purpose) if rank == 0 else {0: _reach(rank, store, address, purpose)}


class Orders:
    """What rank 0 says, in order, to all others; and elsewhere, what is heard of it."""

    def __init__(self, lines: dict[int, socket.socket]) -> None:
        self._lines = tuple(lines.values())
        for line in self._lines:
            line.settimeout(None)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def tell(self, order: bytes) -> None:
        """Raises:
        OSError: if a rank is gone.
        """
        letter = len(order).to_bytes(_HEAD, "little") + order
        for line in self._lines:
            line.sendall(letter)

    def hear(self) -> bytes:
        """Wait for the next one.

        Raises:
            OSError: if rank 0 is gone.
        """
        return self._read(int.from_bytes(self._read(_HEAD), "little"))

    def _read(self, count: int) -> bytes:
        (line,) = self._lines
        parts = bytearray()
        while len(parts) < count:
            part = line.recv(count - len(parts))
            if not part:
                raise ConnectionError("rank 0 is gone")
            parts += part
        return bytes(parts)


def _receive(size: int, store: Any, address: str, purpose: str) -> dict[int, socket.socket]:
    """Let all others come; whoever does not know the word is no rank."""
    word = secrets.token_hex(16)
    lines: dict[int, socket.socket] = {}
    with socket.create_server((address, 0)) as door:
        store.set(f"outrider/{purpose}", f"{door.getsockname()[1]} {word}")
        door.settimeout(PATIENCE)
        while len(lines) < size - 1:
            try:
                line, _ = door.accept()
                line.settimeout(PATIENCE)
                said = line.makefile("rb").readline(128).decode().split()
            except (OSError, UnicodeDecodeError) as error:
                raise RankError(f"{size - 1 - len(lines)} of {size} ranks did not come: {error}") from error
            if len(said) == 2 and said[0] == word:
                lines[int(said[1])] = line
    return lines


def _reach(rank: int, store: Any, address: str, purpose: str) -> socket.socket:
    port, word = store.get(f"outrider/{purpose}").decode().split()
    try:
        line = socket.create_connection((address, int(port)), timeout=PATIENCE)
        line.sendall(f"{word} {rank}\n".encode())
    except OSError as error:
        raise RankError(f"rank {rank} cannot reach rank 0 at {address}:{port} ({error})") from error
    return line
