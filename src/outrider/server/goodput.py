"""Which samples came in time, lately: what a fleet of servers is scaled by, beside its queues."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

WINDOW = 30.0
"""Seconds that `rates` looks back."""


class Goodput:
    """Judges samples that ended; any thread may use it.

    Goodput is the rate of requests that kept their goals for the first token and for the time between tokens
    (DistServe, arXiv:2401.09670, section 2).

    Args:
        first_token: seconds from arrival to the first token. token: mean seconds of each further token.
        clock: seconds, monotonic.
    """

    def __init__(self, first_token: float, token: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.first_token = first_token
        self.token = token
        self._clock = clock
        self._began = clock()
        self._ended: deque[tuple[float, bool]] = deque()
        self._lock = threading.Lock()

    def judge(self, first: float, whole: float, count: int) -> bool:
        """Note a sample of `count` tokens that ended `whole` seconds after its arrival -> whether it came in time.

        Args:
            first: seconds from its arrival to its first token.
        """
        was_good = first <= self.first_token and (count < 2 or whole - first <= self.token * (count - 1))
        self._note(was_good)
        return was_good

    def miss(self) -> None:
        """Note a sample that was given up for want of time."""
        self._note(False)

    def rates(self) -> tuple[float, float]:
        """Samples a second over the last `WINDOW` seconds: those that came in time, and all that ended."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            seconds = max(1.0, min(WINDOW, now - self._began))
            good = sum(was_good for _, was_good in self._ended)
            return good / seconds, len(self._ended) / seconds

    def _note(self, was_good: bool) -> None:
        with self._lock:
            now = self._clock()
            self._forget(now)
            self._ended.append((now, was_good))

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0][0] < now - WINDOW:
            self._ended.popleft()
