"""What may be lost to finding out whether guesses pay by now, in tokens of plain decoding: a share of the time."""

from __future__ import annotations

START = 0.5
"""Of a new request: a few guesses that find nothing."""
SHARE = 0.01
"""Of a request's time that it may lose to guesses that promise no gain."""
MOST = 4.0
"""What was left unspent of that: so much is lost at most at once."""
DEAR = 0.5
"""A guess that is expected to lose more than this is paid out of the common purse."""
COMMON_SHARE = 0.003
"""Of all requests' time that may go into guesses that are dear, or whose drafter must read a text first."""
COMMON_MOST = 24.0
COMMON_FIRST = 4.0
"""Before anything is known."""


class Purses:
    """One a request, and a common one for what is dear: a drafter may take longer to read a prompt than a share of one
    request allows, and one guess among many requests keeps all of them waiting.

    A guess is paid for by what it was expected to lose, not by what it happened to bring: so texts about which little
    is known, or whose guesses nearly pay, are asked often, hopeless ones seldom, and luck drains nothing.
    """

    def __init__(self) -> None:
        self._cycle = 0
        self._common = COMMON_FIRST
        self._lent = 0.0
        self._own: dict[int, tuple[float, int]] = {}
        """What a request had left, and in which cycle."""

    def affords(self, request_id: int, loss: float, reading: float) -> bool:
        """Whether a request may guess in this cycle, though it must be expected to lose so much, after reading for
        `reading` tokens.
        """
        own, common = _parts(loss, reading)
        if self._left(request_id) < own or (common and self._common - self._lent < common):
            return False
        self._lent += common
        return True

    def pay(self, request_id: int, loss: float, reading: float) -> None:
        """A guess was made that was expected to lose so much."""
        own, common = _parts(loss, reading)
        self._own[request_id] = (self._left(request_id) - own, self._cycle)
        self._common = max(0.0, self._common - common)

    def earn(self, tokens: int) -> None:
        """A cycle of so many requests went by."""
        self._cycle += 1
        self._lent = 0.0
        self._common = min(COMMON_MOST, self._common + COMMON_SHARE * tokens)

    def begin(self, request_id: int) -> None:
        self._own[request_id] = (START, self._cycle)

    def forget(self, request_id: int) -> None:
        self._own.pop(request_id, None)

    def _left(self, request_id: int) -> float:
        left, cycle = self._own.get(request_id, (START, self._cycle))
        return min(MOST, left + SHARE * (self._cycle - cycle))


def _parts(loss: float, reading: float) -> tuple[float, float]:
    """What the own and the common purse pay."""
    loss = max(0.0, loss)
    return (loss, reading) if loss <= DEAR else (0.0, loss + reading)
