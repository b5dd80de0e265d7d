"""Looks after the processes that share a target: one that is lost ends the job with one sentence, and nobody hangs.

A process that waits for a lost one inside a library cannot be called back, least of all by its own Python. So every
rank has a thread with an open connection to rank 0 (and rank 0 one to each), which the system closes when a process
dies. The thread that sees it says what happened and ends its own process.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import NoReturn

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
        lines: as `lines.connect` makes them.
    """

    def __init__(self, rank: int, size: int, lines: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.size = size
        self.is_over = False
        """Whether connections may close from now on: the job ends as it should."""
        self._peers = lines
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
