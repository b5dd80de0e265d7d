"""What a request may lose to guesses: a purse in tokens of plain decoding, filled by a share of its time and by gains.

A sequential test with a bounded loss: while guesses bring more than they cost the purse stays full and they go on; ones
that lose drain it, and then no more is spent on them than the share. A running mean cannot do that: it forgets by
chance what pays, and while nothing is asked it learns nothing.
"""

from __future__ import annotations

SHARE = 0.017
"""Of its time that every request may spend on finding out whether guesses pay by now."""
MOST_GAINED = 4.0
"""What guesses gained fills no purse further: so much is lost at most where a text changes from one that pays."""
MOST = 24.0
"""What was left unspent does: a drafter may have to read a long prompt before it can be tried."""
FIRST = 2.0
"""The first request's, before anything is known."""


class Purses:
    """One a request; a new one is as full as the pool, which gains and loses with all, and inherits what one leaves.

    Where guesses never pay, that is the share and no more, however many requests come: one too short for a drafter that
    must read its prompt first leaves the next one enough to try it.
    """

    def __init__(self) -> None:
        self._pool = FIRST
        self._own: dict[int, float] = {}

    def of(self, request_id: int) -> float:
        """Tokens' worth of time that may be lost now."""
        return self._own.get(request_id, self._pool)

    def earn(self, request_id: int, tokens: float) -> None:
        """A pass of so many tokens' worth of time went by."""
        self._own[request_id] = min(MOST, self.of(request_id) + SHARE * tokens)

    def settle(self, request_id: int, gain: float, catch_up: float) -> None:
        """A guess is settled. gain: tokens accepted, less the time that guessing took in tokens, but for `catch_up`.

        What a drafter spends on reading a text is an investment of the whole request: it empties a purse, but leaves no
        debt that would keep what was read from being used.
        """
        own = self.of(request_id)
        own = max(own - catch_up, min(own, 0.0))
        self._own[request_id] = _gained(own, gain)
        self._pool = max(0.0, _gained(self._pool, gain - catch_up))

    def forget(self, request_id: int) -> None:
        self._pool = max(self._pool, self._own.pop(request_id, 0.0))


def _gained(purse: float, gain: float) -> float:
    return min(purse + gain, max(purse, MOST_GAINED))
