"""What happened, in numbers only: one record a cycle, pooled for a request or a run; one record, many readers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

CERTAIN = 1.96
"""Standard deviations to either side that hold 95 of 100 values."""


@dataclass(frozen=True, slots=True)
class RequestCycle:
    """One request's part of a cycle: nodes drafted, the tree's depth, tokens delivered, the drafter's grade, whether a
    guess was asked for, which may have come back empty, and how many accepted nodes it promised (None: nobody knows).
    """

    request_id: int
    drafted: int
    depth: int
    delivered: int
    grade: int | None = None
    asked: bool = False
    promised: float | None = None


class Laps:
    """Seconds of the parts of a start; what passes until `end` belongs to the part that ends there.

    Attributes:
        seconds: by part, in order; a part that ends more than once has its sum.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._last = clock()

    def end(self, part: str) -> None:
        now = self._clock()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """How many times as fast as plain decoding, and bounds that should hold it in 95 of 100 cases."""

    ratio: float
    low: float
    high: float


@dataclass(slots=True)
class Saving:
    """What decoding took, beside what the same tokens would have taken without guesses: sums over a request's cycles.

    Attributes:
        spent: seconds of its cycles. plain: of as many plain passes as it got tokens, by measured prices.
        doubt: seconds by which all those prices together may be wrong the same way (a standard deviation). noise: the
            variance that single passes add to it.
    """

    spent: float = 0.0
    plain: float = 0.0
    doubt: float = 0.0
    noise: float = 0.0

    def add(self, other: Saving) -> None:
        """Pool another saving into this one."""
        self.spent += other.spent
        self.plain += other.plain
        self.doubt += other.doubt
        self.noise += other.noise

    def fade(self, keep: float) -> None:
        """Let what is known so far weigh `keep` times as much."""
        self.spent *= keep
        self.plain *= keep
        self.doubt *= keep
        self.noise *= keep * keep

    def to_json(self) -> dict[str, float] | None:
        """The speed-up with its bounds, as every answer tells it; None before the first cycle."""
        found = self.speed_up
        return None if found is None else {"ratio": found.ratio, "low": found.low, "high": found.high}

    @property
    def speed_up(self) -> SpeedUp | None:
        """None before the first cycle. What is in doubt is the price of plain decoding: its own seconds are known."""
        if not self.spent:
            return None
        around = CERTAIN * math.hypot(self.doubt, math.sqrt(self.noise))
        return SpeedUp(
            self.plain / self.spent, max(0.0, self.plain - around) / self.spent, (self.plain + around) / self.spent
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One call of `step`: rows of the pass, what each decoding request drafted and got, seconds by part.

    Attributes:
        keys: that all rows read together. overlaps: a cycle on the device beside others: only `seconds_total` is known,
            from the end of the one before. captures: a graph was taken meanwhile, so that its seconds tell nothing of
            the next ones.
        saving: of all its requests together; None where there is no drafter, or nobody decoded.
        seconds_books: part of the total that guessing costs even where nobody guesses: grades, budgets, and what the
            drafter looks at.
        seconds_expected: what the total should have been by the prices that were known before the cycle, with the rows,
            levels and reading that it had; None where prompts were read, or nobody decoded.
    """

    rows: int
    prefill_rows: int
    cycles: tuple[RequestCycle, ...]
    seconds_draft: float
    seconds_verify: float
    seconds_sample: float
    seconds_total: float
    keys: int = 0
    overlaps: bool = False
    saving: Saving | None = None
    seconds_books: float = 0.0
    seconds_expected: float | None = None
    captures: bool = False


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """One guess of a cycle.

    Attributes:
        parent: index of the node before it, -1 for the first level.
        p: its chance under the law that the target draws from there, None where that law was never needed or there is
            none. q: its chance under the law that the drafter drew it from, None where it named none (a point mass).
        verdict: "accepted"; "rejected" (the target stood before it and went another way); "unreached".
    """

    token: int
    parent: int
    p: float | None
    q: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class CycleTrace:
    """What one pass guessed for a request, and what the target drew last itself: `drawn`, of chance `p`."""

    nodes: tuple[NodeTrace, ...]
    drawn: int
    p: float | None


@dataclass(slots=True)
class Tally:
    """Pooled counters of one request or of many; rates are quotients of sums, never means of means.

    A cycle is a decode pass; the token that prefill yields belongs to none. In a cycle cut by an end, the last
    delivered token counts as the drawn one, so `tau = 1 + accepted / cycles = (completion tokens - 1) / cycles`
    holds exactly.
    """

    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    seconds_prefill: float = 0.0
    seconds_draft: float = 0.0
    seconds_verify: float = 0.0
    seconds_sample: float = 0.0
    seconds_total: float = 0.0
    saving: Saving = field(default_factory=Saving)

    def count(self, drafted: int, delivered: int) -> None:
        """Count one cycle that drafted `drafted` nodes and delivered `delivered >= 1` tokens."""
        accepted = delivered - 1
        self.cycles += 1
        self.drafted += drafted
        self.accepted += accepted
        while len(self.accepted_by_position) < accepted:
            self.accepted_by_position.append(0)
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    def add(self, other: Tally) -> None:
        """Pool another tally into this one."""
        self.cycles += other.cycles
        self.drafted += other.drafted
        self.accepted += other.accepted
        missing = len(other.accepted_by_position) - len(self.accepted_by_position)
        self.accepted_by_position += [0] * max(0, missing)
        for position, count in enumerate(other.accepted_by_position):
            self.accepted_by_position[position] += count
        self.seconds_prefill += other.seconds_prefill
        self.seconds_draft += other.seconds_draft
        self.seconds_verify += other.seconds_verify
        self.seconds_sample += other.seconds_sample
        self.seconds_total += other.seconds_total
        self.saving.add(other.saving)

    @property
    def tau(self) -> float | None:
        """Mean accepted length, the target's own token included; None before the first cycle."""
        return 1 + self.accepted / self.cycles if self.cycles else None
