"""Looks after the processes that share a target: one that is lost ends the job with one sentence, and nobody hangs.

A process that waits for a lost one inside a library cannot be called back, least of all by its own Python. So every
rank has a thread with an open connection to rank 0 (and rank 0 one to each), which the system closes when a process
dies. The thread that sees it says what happened and ends its own process.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from typing import Any, NoReturn

from outrider.errors import RankError

BEAT = 1.0
"""Seconds between two signs of life."""
PATIENCE = 10.0
"""A rank that gave no sign for so many seconds (its machine is gone, or it was stopped) is lost."""
GRACE = 2.0
"""Seconds in which a rank that was told of the end should have ended by itself."""
_ALIVE, _FAREWELL, _LAST_WORDS = b".", b"#", b"!"


class Watch:
    """The connections of one rank to those that it looks after: rank 0 to all others, they to rank 0.

    Args:
        store: PyTorch's, where rank 0 says how it is reached. address: rank 0's host.

    Raises:
        RankError: if the others do not come.
    """

    def __init__(self, rank: int, size: int, store: Any, address: str) -> None:
        self.rank = rank
        self.size = size
        self.is_over = False
        """Whether connections may close from now on: the job ends as it should."""
        self._peers = self._receive(store, address) if rank == 0 else {0: self._reach(store, address)}
        self._telling = threading.Lock()
        for peer, line in self._peers.items():
            line.settimeout(PATIENCE)
            threading.Thread(target=self._attend, args=(peer, line), name=f"rank {peer}", daemon=True).start()
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()

    def part(self) -> None:
        """Say that this rank leaves as it should."""
        self.is_over = True
        self._tell(_FAREWELL)

    def fail(self, reason: str) -> None:
        """Say why this rank cannot go on."""
        self.is_over = True
        self._tell(_LAST_WORDS + reason.encode())
        for line in self._peers.values():
            line.close()

    def wait(self, error: BaseException) -> NoReturn:
        """A library says that a rank is gone: whoever looks after that rank ends this process in a moment.

        Raises:
            RankError: where nobody does.
        """
        time.sleep(PATIENCE + 2 * BEAT)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RankError(f"the {self.size} ranks no longer reach one another ({reason}): start the job again") from error

    def _receive(self, store: Any, address: str) -> dict[int, socket.socket]:
        """Let all others come; whoever does not know the word is no rank."""
        word = secrets.token_hex(16)
        peers: dict[int, socket.socket] = {}
        with socket.create_server((address, 0)) as door:
            store.set("outrider/watch", f"{door.getsockname()[1]} {word}")
            door.settimeout(60)
            while len(peers) < self.size - 1:
                try:
                    line, _ = door.accept()
                    line.settimeout(PATIENCE)
                    said = line.makefile("rb").readline(128).decode().split()
                except (OSError, UnicodeDecodeError) as error:
                    raise RankError(
                        f"{self.size - 1 - len(peers)} of {self.size} ranks did not come: {error}"
                    ) from error
                if len(said) == 2 and said[0] == word:
                    peers[int(said[1])] = line
        return peers

    def _reach(self, store: Any, address: str) -> socket.socket:
        port, word = store.get("outrider/watch").decode().split()
        try:
            line = socket.create_connection((address, int(port)), timeout=60)
            line.sendall(f"{word} {self.rank}\n".encode())
        except OSError as error:
            raise RankError(f"rank {self.rank} cannot reach rank 0 at {address}:{port} ({error})") from error
        return line

    def _attend(self, peer: int, line: socket.socket) -> None:
        said = b""
        try:
            while part := line.recv(4096):
                said = (said + part).lstrip(_ALIVE)
                if said.startswith(_FAREWELL):
                    return self._follow()
            reason = "is gone"
        except TimeoutError:
            reason = f"gave no sign of life for {PATIENCE:.0f} seconds"
        except OSError:
            reason = "is gone"
        if said.startswith(_LAST_WORDS):
            reason = f"failed ({said[1:].decode(errors='replace')})"
        return self._lose(peer, reason)

    def _follow(self) -> None:
        """Rank 0 left as it should, and so must this process, whatever it waits for."""
        if self.rank:
            self.is_over = True
            time.sleep(GRACE)
            os._exit(0)

    def _lose(self, peer: int, reason: str) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self.rank <= 1:  # one of those that are left speaks for all
            sentence = f"rank {peer} of {self.size} {reason}: the job ends here, start it again"
            os.write(2, f"outrider: {sentence}\n".encode())  # whatever has become of Python's own streams
        self._tell(_FAREWELL)
        os._exit(1)

    def _beat(self) -> None:
        while not self.is_over:
            self._tell(_ALIVE)
            time.sleep(BEAT)

    def _tell(self, message: bytes) -> None:
        with self._telling:
            for line in self._peers.values():
                try:
                    line.sendall(message)
                except OSError:  # whoever attends to that rank sees it, too
                    continue
