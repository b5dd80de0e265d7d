"""What a load brought: requests as their clients saw them, summed up by level and by task, beside plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.measure.intervals import Interval, median, percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One way of asking: so many clients at once, each asking again when it was answered, or arrivals at a rate.

    Attributes:
        clients: at once; None with a rate. rate: requests a second, at times of their own (Poisson); None with clients.
    """

    clients: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.clients} clients" if self.clients is not None else f"{self.rate:g} requests/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a request must keep to count as good: seconds to its first token, and mean seconds a token behind it."""

    first_token: float = 2.0
    token: float = 0.2


@dataclass(slots=True)
class Sample:
    """One request as its client saw it.

    Attributes:
        number: of the request; the same one asks the same prompt, in whichever way. seconds: from sending to the end.
        first: to the first text. gaps: between pieces of text. tokens: as the server counts them. error: why there was
        no answer.
    """

    number: int = 0
    seconds: float = 0.0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    speculation: dict[str, Any] | None = None
    error: str | None = None

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds a token behind the first."""
        return None if self.first is None or self.tokens < 2 else (self.seconds - self.first) / (self.tokens - 1)

    def is_good(self, goal: Goal) -> bool:
        if self.error is not None or self.first is None or self.first > goal.first_token:
            return False
        return self.token_seconds is None or self.token_seconds <= goal.token


@dataclass(slots=True)
class Outcome:
    """What a level brought; seconds are percentiles over requests, `between` over all gaps of all requests.

    Attributes:
        is_plain: speculation was off. errors: how often each. accepted_by_position: of our server's own counts.
        estimated: median of what answers say of their speed-up. ratio: measured, against the plain run of the level:
        median over prompts of an answer's tokens a second, with its bounds. by_task: the same of each task. parts:
        seconds that the server's passes spent meanwhile, where it tells.
    """

    level: str
    clients: int | None
    rate: float | None
    temperature: float
    is_plain: bool
    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    goodput: float
    first_token: dict[str, float]
    token: dict[str, float]
    between: dict[str, float]
    whole: dict[str, float]
    tau: float | None
    cycles: int
    accepted_by_position: list[int]
    estimated: float | None
    ratio: dict[str, Any] | None = None
    by_task: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Observed:
    """All samples of one level asked in one way, over its repeats, and the seconds that they took together."""

    level: Level
    temperature: float = 0.0
    is_plain: bool = False
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, samples: Sequence[Sample], seconds: float, parts: dict[str, float]) -> None:
        """Take in one more run."""
        self.samples += samples
        self.seconds += seconds
        for part, spent in parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + spent

    def outcome(self, name: str, goal: Goal, tasks: Sequence[str], plain: Observed | None = None) -> Outcome:
        """Sum up. `goodput` counts requests a second that kept the goal.

        Args:
            tasks: of the prompts, in their order. plain: the same level, drawn plainly.
        """
        answered = [sample for sample in self.samples if sample.error is None]
        errors: dict[str, int] = {}
        for sample in self.samples:
            if sample.error is not None:
                errors[sample.error] = errors.get(sample.error, 0) + 1
        told = [(sample.speculation or {}).get("speed_up") for sample in answered]
        estimates = [each["ratio"] for each in told if each]
        estimate = median(estimates)
        return Outcome(
            level=name,
            clients=self.level.clients,
            rate=self.level.rate,
            temperature=self.temperature,
            is_plain=self.is_plain,
            requests=len(self.samples),
            failed=len(self.samples) - len(answered),
            errors=errors,
            seconds=self.seconds,
            tokens_per_second=sum(sample.tokens for sample in answered) / self.seconds,
            requests_per_second=len(answered) / self.seconds,
            goodput=sum(sample.is_good(goal) for sample in self.samples) / self.seconds,
            first_token=percentiles([s.first for s in answered if s.first is not None]),
            token=percentiles([s.token_seconds for s in answered if s.token_seconds is not None]),
            between=percentiles([gap for sample in answered for gap in sample.gaps]),
            whole=percentiles([sample.seconds for sample in answered]),
            **_speculation(answered),
            estimated=None if estimate is None else estimate.ratio,
            ratio=_told(self.ratio(plain, len(tasks))),
            by_task=self._by_task(tasks, plain),
            parts=self.parts,
        )

    def ratio(self, plain: Observed | None, count: int, only: frozenset[int] | None = None) -> Interval | None:
        """An answer's tokens a second over the plain one's, prompt by prompt; None where none was answered both ways.

        count: of the prompts, which requests ask in turns. only: these prompts.
        """
        if plain is None:
            return None
        others = {sample.number: sample for sample in plain.samples if sample.error is None}
        sums: dict[int, list[float]] = {}
        for mine in self.samples:
            other, prompt = others.get(mine.number), mine.number % count
            if mine.error is not None or other is None or not (only is None or prompt in only):
                continue
            if mine.tokens and other.tokens:
                found = sums.setdefault(prompt, [0.0] * 4)
                for place, value in enumerate((mine.tokens, mine.seconds, other.tokens, other.seconds)):
                    found[place] += value
        return median([(tokens / seconds) / (least / spent) for tokens, seconds, least, spent in sums.values()])

    def _by_task(self, tasks: Sequence[str], plain: Observed | None) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for task in dict.fromkeys(tasks):
            prompts = frozenset(i for i, name in enumerate(tasks) if name == task)
            mine = [sample for sample in self.samples if sample.number % len(tasks) in prompts]
            answered = [sample for sample in mine if sample.error is None]
            found[task] = {
                "requests": len(mine),
                "failed": len(mine) - len(answered),
                "first_token": percentiles([s.first for s in answered if s.first is not None]),
                "token": percentiles([s.token_seconds for s in answered if s.token_seconds is not None]),
                "tau": _speculation(answered)["tau"],
                "ratio": _told(self.ratio(plain, len(tasks), prompts)),
            }
        return found


def _told(found: Interval | None) -> dict[str, Any] | None:
    return None if found is None else found.to_json()


def _speculation(answered: Sequence[Sample]) -> dict[str, Any]:
    """Pooled counts of what our server tells; nothing of another's."""
    told = [sample.speculation for sample in answered if sample.speculation is not None]
    cycles = sum(each["cycles"] for each in told)
    rows = [each.get("accepted_by_position", ()) for each in told]
    kept = [sum(row[i] for row in rows if len(row) > i) for i in range(max(map(len, rows), default=0))]
    tau = 1 + sum(each["accepted"] for each in told) / cycles if cycles else None
    return {"tau": tau, "cycles": cycles, "accepted_by_position": kept}
