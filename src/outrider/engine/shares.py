"""Whose turn it is: of what there is now, every client gets an equal share, however much one asks for. No torch."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from outrider.request import Request

MOST_TURNS = 4096
"""Clients whose last turn is remembered; one that is forgotten counts as one that never had any."""


class Line:
    """Requests that wait: the smallest priority number first, clients in turns, and one client's by their arrival.

    A turn goes to the client with the fewest seats (requests that run), then to the one whose last turn is longest ago.
    No other history counts: whoever used an idle engine owes nothing for it.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], deque[Request]] = {}
        self._turns: dict[str, int] = {}  # the longest ago first
        self._count = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(self._lines.values())

    def add(self, request: Request) -> None:
        """Behind all others of its client and priority."""
        self._lines.setdefault((request.priority, request.client), deque()).append(request)

    def put_back(self, request: Request) -> None:
        """Before all others of its client and priority."""
        self._lines.setdefault((request.priority, request.client), deque()).appendleft(request)

    def first(self, running: Iterable[Request]) -> Request | None:
        """Whoever is next beside those that run; None: nobody waits."""
        if not self._lines:
            return None
        seats = _seats(running)
        level = min(priority for priority, _ in self._lines)
        heads = [line[0] for (priority, _), line in self._lines.items() if priority == level]
        return min(heads, key=lambda r: (seats[r.client], self._turns.get(r.client, -1), r.id))

    def take(self, request: Request) -> None:
        """It waits no more: this was its client's turn."""
        self.remove(request)
        self._turns.pop(request.client, None)
        self._turns[request.client] = next(self._count)
        if len(self._turns) > MOST_TURNS:
            del self._turns[next(iter(self._turns))]

    def remove(self, request: Request) -> None:
        """It waits no more, without a turn."""
        key = (request.priority, request.client)
        self._lines[key].remove(request)
        if not self._lines[key]:
            del self._lines[key]


def ranked(running: Sequence[Request]) -> list[Request]:
    """Whoever is served first, first: by priority, then those whose client runs fewest, then by admission."""
    seats = _seats(running)
    return sorted(running, key=lambda r: (r.priority, seats[r.client]))


def yielding(request: Request, running: Sequence[Request]) -> Request | None:
    """Who gives its seat to a request that waits: one of a larger priority number, or of a client that runs more even
    after that; the newest. None: all have no more than their share.
    """
    seats = _seats(running)
    for one in reversed(ranked(running)):
        if one.priority > request.priority:
            return one
        if one.priority == request.priority and seats[one.client] > seats[request.client] + 1:
            return one
    return None


def rations(rows: int, wanted: Mapping[str, int], had: Mapping[str, int]) -> dict[str, int]:
    """Rows for each client, no more than it wants, such that those with the fewest in this pass get most (max-min).

    Args:
        rows: to be given out. had: rows of this pass that a client has already.
    """
    if len(wanted) == 1:
        return {client: min(rows, most) for client, most in wanted.items()}

    def up_to(level: int) -> dict[str, int]:
        return {client: min(most, max(0, level - had.get(client, 0))) for client, most in wanted.items()}

    low, high = 0, rows + max((had.get(client, 0) for client in wanted), default=0)
    while low < high:  # the highest level to which all can be filled
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(up_to(middle).values()) <= rows else (low, middle - 1)
    given, above = up_to(low), up_to(low + 1)
    left = rows - sum(given.values())
    for client in given:
        if left and above[client] > given[client]:
            given[client] += 1
            left -= 1
    return given


def _seats(running: Iterable[Request]) -> Counter[str]:
    """How many run, by client."""
    return Counter(request.client for request in running)
