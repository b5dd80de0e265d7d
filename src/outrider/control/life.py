"""What control keeps of every running request."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from outrider.request import Request

HEATS = (1e-6, 0.5, 0.9)
"""Temperatures that are told apart begin here."""
LAG = 8
"""Tokens with which a drafter's own stack catches up at no price worth naming."""
SERVES = 160
"""Tokens for which reading a text serves at most, as far as anyone knows: few replies are longer."""


@dataclass(slots=True)
class Life:
    """A request as control knows it.

    Attributes:
        heat: of its temperature. last: the cycle in which a guess without, and with, a grade was last asked for.
        width: most children of one node, where it wants fewer than all. read: tokens when a guess without a grade was
            asked for, all of which its drafter has read. unread: tokens that have come since. left: tokens that may
            still come. invests: whether its trees promise to pay for what is to be read.
    """

    heat: int
    last: list[int]
    width: int | None = None
    read: int = 0
    unread: int = 0
    left: int = SERVES
    invests: bool = False

    @property
    def lag(self) -> int:
        """Tokens that its drafter must read at a price before it guesses."""
        return self.unread if self.unread > LAG else 0


class Lives:
    """By request id; one that was never met is as one of a greedy request."""

    def __init__(self) -> None:
        self._lives: dict[int, Life] = {}

    def __getitem__(self, request_id: int) -> Life:
        life = self._lives.get(request_id)
        if life is None:
            life = self._lives[request_id] = Life(0, [0, 0])
        return life

    def meet(self, request: Request, cycle: int) -> bool:
        """Bring up to date what is known of it; whether it is new."""
        life = self._lives.get(request.id)
        is_new = life is None
        if life is None:
            params = request.params
            heat = bisect_right(HEATS, params.temperature)
            life = self._lives[request.id] = Life(heat, [cycle, cycle], params.width)
        life.unread = request.num_tokens - life.read
        life.left = min(SERVES, request.limit - len(request.output))
        return is_new

    def forget(self, request_id: int) -> None:
        self._lives.pop(request_id, None)
