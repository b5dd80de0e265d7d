"""Where a cycle's time goes: an engine that marks the parts of its cycles on the device's own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.drafters.base import Commit
from outrider.engine.ends import Emission
from outrider.engine.flight import Flight
from outrider.engine.scheduler import Work
from outrider.engine.step import Engine
from outrider.errors import ConfigError
from outrider.models.batch import FlatBatch
from outrider.record import Record
from outrider.request import Request, SamplingParams
from outrider.tree import DraftTree

LOCKSTEP = "lockstep"
"""How a row ran: the host reads each cycle before it launches the next."""
LEAST, PATIENCE = 3, 1.0
"""Repeats, and seconds of them, after which a slow run is known well enough."""
Mark = Any
"""A point of time: an event in the stream of a GPU, seconds of the clock elsewhere."""


def mark(device: torch.device) -> Mark:
    """Now; on a GPU, when all that was asked of it before is done. Nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(first: Mark, last: Mark) -> float:
    """Seconds from one mark to a later one; the device must have passed both."""
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3


def wait(device: torch.device) -> None:
    """Until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, run: Callable[[], Any], repeats: int, warm_ups: int = 2) -> float:
    """Median seconds of `run`, alone on the device, after `warm_ups` runs that do not count.

    Where it is slow, it runs less often: `LEAST` times, then as long as `PATIENCE` lasts.
    """
    for _ in range(warm_ups):
        run()
    wait(device)
    taken: list[float] = []
    for _ in range(repeats):
        if len(taken) >= LEAST and sum(taken) > PATIENCE:
            break
        first = mark(device)
        run()
        last = mark(device)
        wait(device)
        taken.append(between(first, last))
    return statistics.median(taken)


@dataclass(frozen=True, slots=True)
class Cycle:
    """One step in numbers.

    Attributes:
        rows: of the target's pass. delivered, drafted: tokens and nodes of all requests. levels: of the deepest tree.
        requests: that decoded. seconds, target, draft: of the whole step, the target's pass, and the drafter's verbs
            (proposals and catching up).
    """

    rows: int
    requests: int
    delivered: int
    drafted: int
    levels: int
    seconds: float
    target: float
    draft: float

    @property
    def rest(self) -> float:
        """Seconds that are neither the target's nor the drafter's."""
        return self.seconds - self.target - self.draft


@dataclass(slots=True)
class _Marks:
    began: Mark
    built: Mark = None
    verified: Mark = None
    ended: Mark = None
    drafts: list[tuple[Mark, Mark]] = field(default_factory=list)
    record: Record | None = None


class TimedEngine(Engine):
    """An idle engine over again, with the same books and stacks; it raises what a drafter does wrong."""

    strict = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(
            engine.target, engine.pages, engine.scheduler, engine.drafter, engine.control, engine.acceptance
        )
        self._marks: list[_Marks] = []

    def launch(self) -> Flight:
        self._marks.append(_Marks(self._now()))
        flight = super().launch()
        self._marks[-1].verified = self._now()
        return flight

    def collect(self, flight: Flight) -> tuple[list[Emission], Record]:
        emissions, record = super().collect(flight)
        self._marks[-1].ended, self._marks[-1].record = self._now(), record
        return emissions, record

    def cycles(self) -> list[Cycle]:
        """The decoding steps since the last call, those that also read prompts left out."""
        wait(self.target.device)
        marks, self._marks = self._marks, []
        done = ((m, m.record) for m in marks if m.record is not None)
        return [_cycle(m, record) for m, record in done if record.cycles and not record.prefill_rows]

    def _propose(self, works: Sequence[Work]) -> tuple[DraftTree, ...]:
        return self._drafting(lambda: super(TimedEngine, self)._propose(works))

    def _probe(self, works: Sequence[Work]) -> tuple[DraftTree, ...]:
        return self._drafting(lambda: super(TimedEngine, self)._probe(works))

    def _observe(self, flight: Flight, commits: Sequence[Commit]) -> None:
        self._drafting(lambda: super(TimedEngine, self)._observe(flight, commits))

    def _build(self, *given: Any) -> tuple[FlatBatch, tuple[int, ...]]:
        built = super()._build(*given)
        self._marks[-1].built = self._now()
        return built

    def _drafting(self, run: Callable[[], Any]) -> Any:
        if self.drafter is None:
            return run()
        first = self._now()
        found = run()
        self._marks[-1].drafts.append((first, self._now()))
        return found

    def _now(self) -> Mark:
        return mark(self.target.device)


def _cycle(marks: _Marks, record: Record) -> Cycle:
    return Cycle(
        rows=record.rows,
        requests=len(record.cycles),
        delivered=sum(cycle.delivered for cycle in record.cycles),
        drafted=sum(cycle.drafted for cycle in record.cycles),
        levels=max(cycle.depth for cycle in record.cycles),
        seconds=between(marks.began, marks.ended),
        target=between(marks.built, marks.verified),
        draft=sum(between(*part) for part in marks.drafts),
    )


def answer(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    together: int = 1,
    note: Callable[[Record], None] = lambda record: None,
) -> list[Request]:
    """Let the engine answer prompts, so many at a time, each with at most `params.max_tokens` tokens.

    Args:
        note: told of every step.

    Raises:
        ConfigError: if a request failed.
    """
    done: list[Request] = []
    seed, target = params.seed or 0, engine.target
    ends = frozenset() if params.ignore_eos else target.eos_ids
    for start in range(0, len(prompts), together):
        wave = []
        for number, prompt in enumerate(prompts[start : start + together], start):
            room = engine.scheduler.max_context - len(prompt)
            limit = min(params.max_tokens or room, room)
            wave.append(Request(number, prompt, params, seed + number, end_ids=ends, limit=limit))
            engine.add(wave[-1])
        while not all(request.is_finished for request in wave):
            note(engine.step()[1])
        done += wave
    failed = next((request.error for request in done if request.error is not None), None)
    if failed is not None:
        raise ConfigError(f"a prompt failed while it was measured: {failed}")
    return done


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decoding cycles, prompts left out; seconds are means a cycle, rates are quotients of sums.

    Attributes:
        tau: tokens a request and cycle. levels, rows: means. target, draft, rest: parts of `cycle`, in seconds.
        alone: seconds of the same passes when nothing but passes runs; None where that was not measured.
        way: how most cycles ran: `LOCKSTEP`, each read before the next begins, where parts are marked as they pass; or
            in flight (`flight`), where they are timed alone. in_flight: share of the cycles that were.
        device: seconds of the device alone for a cycle in flight; None in lockstep.
    """

    cycles: int
    tokens_per_second: float
    tau: float
    levels: float
    rows: float
    cycle: float
    target: float
    draft: float
    rest: float
    alone: float | None = None
    way: str = LOCKSTEP
    in_flight: float = 0.0
    device: float | None = None

    @staticmethod
    def of(cycles: Sequence[Cycle], alone: Callable[[int], float] | None = None) -> Decoding:
        """alone: seconds of a pass by its rows.

        Raises:
            ConfigError: where there is no cycle.
        """
        if not cycles:
            raise ConfigError("nothing was decoded: give prompts with longer replies")
        count, seconds = len(cycles), sum(c.seconds for c in cycles)
        delivered = sum(c.delivered for c in cycles)
        return Decoding(
            cycles=count,
            tokens_per_second=delivered / seconds,
            tau=delivered / sum(c.requests for c in cycles),
            levels=sum(c.levels for c in cycles) / count,
            rows=sum(c.rows for c in cycles) / count,
            cycle=seconds / count,
            target=sum(c.target for c in cycles) / count,
            draft=sum(c.draft for c in cycles) / count,
            rest=sum(c.rest for c in cycles) / count,
            alone=None if alone is None else sum(alone(c.rows) for c in cycles) / count,
        )
