"""What may be lost to guesses, in tokens of plain decoding: a request's own winnings, and a common purse.

The purse is filled by a share of the time and by gains.

A sequential test with a bounded loss, measured and not modelled: what a cycle took beyond plain decoding, against what
it brought. Guesses go on while what they won pays for them, so that a few that fail by chance end nothing. Once that is
lost, tries are paid out of the common purse, for each request further and further apart. A running mean cannot do that:
it forgets by chance what pays, and while nothing is asked it learns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.01
"""Of the time that may be spent on finding out whether guesses pay by now."""
MOST_WON = 8.0
"""What guesses won beyond this is not risked again: so much is lost at most where a text changes from one that pays."""
MOST_SAVED = 24.0
"""What was left unspent of the share: a drafter may have to read a long prompt before it can be tried."""
FIRST = 4.0
"""What may be lost before anything is known."""
LONGEST = 64
"""Cycles between two tries of a request at most."""
TRIES = 2
"""Tries that failed in a row before the next one has to wait, twice as long every time."""


@dataclass(slots=True)
class _Own:
    """A request's winnings, its guesses in a row that brought no gain, and the cycle of the last one."""

    won: float = 0.0
    failed: int = 0
    last: int = -LONGEST


@dataclass(slots=True)
class _Common:
    """What all requests won, and what was saved of the share, at a load."""

    won: float = FIRST
    saved: float = 0.0


class Purses:
    """The common purses, and every request's own winnings, which its losses drain first.

    There is a purse for every doubling of the load: what pays for one request may lose for four, and what was lost then
    says nothing once the others have gone.
    """

    def __init__(self) -> None:
        self._purses: dict[int, _Common] = {}
        self._here = self._purses.setdefault(1, _Common())
        self._own: dict[int, _Own] = {}
        self._cycle = 0
        self._lent = 0.0

    @property
    def left(self) -> float:
        """Of the common purse, but for what this cycle's tries were given already."""
        return self._here.won + self._here.saved - self._lent

    def at(self, count: int) -> None:
        """So many requests decode in the cycle that follows."""
        self._here = self._purses.setdefault(count.bit_length(), _Common())
        self._lent = 0.0

    def save(self, tokens: float) -> None:
        """A pass of so many tokens' worth of time went by."""
        self._here.saved = min(MOST_SAVED, self._here.saved + SHARE * tokens)
        self._cycle += 1
        self._lent = 0.0

    def may_ask(self, request_id: int, price: float, promises: bool) -> bool:
        """Whether a guess that may lose `price` tokens may be made. promises: it is expected to bring a gain."""
        own = self._own.setdefault(request_id, _Own())
        if own.won >= price:
            return True
        wait = min(LONGEST, 1 << (own.failed - TRIES)) if own.failed >= TRIES and not promises else 0
        if self.left < (0 if promises else price) or self._cycle - own.last < wait:
            return False
        self._lent += price
        return True

    def settle(self, request_id: int, gain: float, catch_up: float) -> None:
        """A guess is settled. gain: tokens accepted, less the time that guessing took in tokens, but for `catch_up`.

        What a drafter spends on reading a text is an investment of the whole request: it empties the purse, but leaves
        no debt that would keep what was read from being used.
        """
        own = self._own.setdefault(request_id, _Own())
        own.failed, own.last = (0 if gain > 0 else min(own.failed + 1, LONGEST)), self._cycle
        own.won, rest = own.won + gain, 0.0
        if own.won < 0:
            own.won, rest = 0.0, own.won
        own.won = min(own.won, MOST_WON)
        self._pay(min(catch_up, max(0.0, self._here.won + self._here.saved)))
        self._pay(-rest)
        if gain > 0:
            self._here.won = min(self._here.won + gain, max(self._here.won, MOST_WON))

    def forget(self, request_id: int) -> None:
        self._own.pop(request_id, None)

    def _pay(self, tokens: float) -> None:
        """What was saved goes first, what was won next; a debt is one of savings."""
        here = self._here
        from_won = min(tokens - min(tokens, max(0.0, here.saved)), here.won)
        here.won -= from_won
        here.saved -= tokens - from_won
