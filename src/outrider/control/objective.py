"""What control is to bring about: tokens a second in all, short waits for each, or as many as keep a pace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Expected:
    """Tokens that each of `count` requests expects of a pass: one without guesses.

    Attributes:
        tokens: of all. inverse: the sum of one over each one's.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.tokens = self.inverse = float(count)
        self._more: dict[int, float] = {}

    def of(self, request_id: int) -> float:
        return self._more.get(request_id, 1.0)

    def add(self, request_id: int, tokens: float) -> None:
        before = self.of(request_id)
        self._more[request_id] = before + tokens
        self.tokens += tokens
        self.inverse += 1 / (before + tokens) - 1 / before

    def within(self, most: float) -> float:
        """Of all, none counted beyond so many."""
        return min(1.0, most) * (self.count - len(self._more)) + sum(min(each, most) for each in self._more.values())


class Objective(Protocol):
    """Says which of two plans for a pass is the better one; no plan changes a text."""

    def gain(self, before: float, tokens: float, seconds: float) -> float:
        """What `tokens` more are worth to a request that expects `before` of a pass of about so many seconds."""

    def value(self, expected: Expected, seconds: float) -> float:
        """Of a pass of so many seconds, in tokens a second."""


class Throughput:
    """Most tokens a second of all requests together."""

    def gain(self, before: float, tokens: float, seconds: float) -> float:
        return tokens

    def value(self, expected: Expected, seconds: float) -> float:
        return expected.tokens / seconds


class Latency:
    """Least seconds a token in the mean over requests: who gets few tokens a pass is served before who gets many."""

    def gain(self, before: float, tokens: float, seconds: float) -> float:
        return 1 / before - 1 / (before + tokens)

    def value(self, expected: Expected, seconds: float) -> float:
        return expected.count**2 / expected.inverse / seconds


@dataclass(frozen=True, slots=True)
class Goodput:
    """Most tokens a second that come in time: those of a request beyond its pace count for little.

    They count at all so that time is won where everyone's pace is kept: for who waits, and for what is to come.

    Attributes:
        pace: tokens a second that each request should get. extra: what one beyond them is worth.
    """

    pace: float
    extra: float = 0.05

    def gain(self, before: float, tokens: float, seconds: float) -> float:
        timely = min(before + tokens, self.pace * seconds) - min(before, self.pace * seconds)
        return timely + self.extra * (tokens - timely)

    def value(self, expected: Expected, seconds: float) -> float:
        timely = expected.within(self.pace * seconds)
        return (timely + self.extra * (expected.tokens - timely)) / seconds


def objective_of(name: str, pace: float | None = None) -> Objective:
    """The one of a name of `config.OBJECTIVES`; pace: tokens a second, of goodput alone."""
    if name == "goodput":
        return Goodput(pace or 0.0)
    return Latency() if name == "latency" else Throughput()
