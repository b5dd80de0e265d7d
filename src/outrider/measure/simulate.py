"""A world without a model: control, or a fixed setting, over recorded traces and measured costs; thousands of requests
in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.control.cost import PassCost
from outrider.measure.traces import Moment, Trace
from outrider.record import Record, RequestCycle
from outrider.request import Request, SamplingParams
from outrider.tree import Budget


@dataclass(frozen=True, slots=True)
class Drafting:
    """Seconds of a guess: a fixed part, one a level, one a level and further ask, one a token yet to be read."""

    fixed: float = 0.0
    level: float = 0.0
    ask: float = 0.0
    reading: float = 0.0


@dataclass(frozen=True, slots=True)
class World:
    """What things cost.

    Attributes:
        passes: seconds by rows, 256 keys a row. key: of one more key of one row. planning: of every cycle, beside
            its pass. watching: of a request's part of every cycle in which its drafter was asked how sure it is.
        noise: relative standard deviation of every part. stalls: share of the cycles that take three times as long.
    """

    passes: Mapping[int, float]
    drafting: tuple[Drafting, ...]
    key: float = 0.0
    planning: float = 0.4e-3
    watching: float = 0.02e-3
    noise: float = 0.04
    stalls: float = 0.002


class Policy(Protocol):
    """What `Control` is to the engine."""

    def interesting(self, requests: Sequence[Request]) -> bool: ...

    def budget(
        self, requests: Sequence[Request], grades: Mapping[int, Sequence[int | None]] | None
    ) -> dict[int, Budget]: ...

    def learn(self, record: Record) -> None: ...

    def forget(self, request: Request) -> None: ...


class Fixed:
    """Always the first of these members that would guess at all, so many levels deep; none is plain decoding."""

    def __init__(self, *members: int, depth: int = 4) -> None:
        self._members, self._depth = members, depth

    def interesting(self, requests: Sequence[Request]) -> bool:
        return bool(self._members)

    def budget(
        self, requests: Sequence[Request], grades: Mapping[int, Sequence[int | None]] | None
    ) -> dict[int, Budget]:
        budgets = {}
        for request in requests:
            each = (grades or {}).get(request.id, ())
            member = next((m for m in self._members if each and each[m] != 0), None)
            if member is not None:
                budgets[request.id] = Budget(self._depth, 4, 20, member=member, grade=each[member])
        return budgets

    def learn(self, record: Record) -> None: ...

    def forget(self, request: Request) -> None: ...


@dataclass(slots=True)
class Run:
    """What came of it.

    Attributes:
        waits: seconds a token that requests waited in each cycle. asked: requests that guessed, by cycle. ends: seconds
            and tokens of every request that came to its end, and its trace.
    """

    tokens: int = 0
    seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    ends: list[tuple[float, int, Trace]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def wait(self, share: float) -> float:
        """The quantile of what a request waits for a cycle's tokens, in seconds."""
        return sorted(self.waits)[min(len(self.waits) - 1, int(share * len(self.waits)))]


@dataclass(slots=True)
class _Running:
    request: Request
    trace: Trace
    started: float
    read: list[int]

    @property
    def moments(self) -> tuple[Moment, ...]:
        return self.trace.moments[len(self.request.output) - 1]

    @property
    def is_over(self) -> bool:
        return len(self.request.output) > len(self.trace.moments)


def simulate(
    policy: Policy,
    traces: Sequence[Trace],
    world: World,
    concurrency: Callable[[int], int] = lambda cycle: 1,
    seed: int = 0,
) -> Run:
    """Decode every trace once, in order, so many at a time by the number of the cycle; prompts are read for nothing."""
    rng, cost, run = random.Random(seed), PassCost(world.passes, world.key), Run()
    waiting = list(enumerate(traces))[::-1]
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < concurrency(len(run.asked)):
            running.append(_begin(*waiting.pop(), world, run.seconds))
        here = running[: max(1, concurrency(len(run.asked)))]  # where fewer may run, the latest wait
        requests = [one.request for one in here]
        watching = policy.interesting(requests)
        grades = {one.request.id: [m.grade for m in one.moments] for one in here} if watching else None
        budgets = policy.budget(requests, grades)
        record = _cycle(here, budgets, world, cost, rng, len(grades or ()))
        for one, cycle in zip(here, record.cycles, strict=True):
            one.request.output += [0] * cycle.delivered
            run.tokens += cycle.delivered
            run.waits.append(record.seconds_total / cycle.delivered)
        run.seconds += record.seconds_total
        run.asked.append(len(budgets))
        policy.learn(record)
        for one in here:
            if one.is_over:
                running.remove(one)
                policy.forget(one.request)
                run.ends.append((run.seconds - one.started, len(one.request.output), one.trace))
    return run


def _begin(number: int, trace: Trace, world: World, now: float) -> _Running:
    params = SamplingParams(temperature=trace.temperature)
    request = Request(number, (0,) * trace.prompt, params, 0, limit=len(trace.moments) + 1)
    request.output.append(0)  # prefill's
    return _Running(request, trace, now, [0] * len(world.drafting))


def _cycle(
    running: Sequence[_Running],
    budgets: Mapping[int, Budget],
    world: World,
    cost: PassCost,
    rng: random.Random,
    watched: int,
) -> Record:
    """What the engine would have recorded; guesses are as long as they were, or as the budget allows."""
    cycles, rows, keys = [], 0, 0
    deepest, asks, reading = [0] * len(world.drafting), [0] * len(world.drafting), 0.0
    for one in running:
        request, budget = one.request, budgets.get(one.request.id)
        levels = nodes = hits = 0
        if budget is not None:
            moment = one.moments[budget.member]
            levels = min(budget.depth, moment.levels)
            hits = min(moment.hits, levels, len(one.trace.moments) - len(request.output))
            nodes = moment.nodes if levels == moment.levels else min(moment.nodes, levels * budget.width)
            deepest[budget.member] = max(deepest[budget.member], levels, 1)
            asks[budget.member] += 1
            reading += (request.num_tokens - one.read[budget.member]) * world.drafting[budget.member].reading
            one.read[budget.member] = request.num_tokens
        rows += 1 + nodes
        keys += (1 + nodes) * request.num_tokens
        told = (None, False, 0) if budget is None else (budget.grade, True, budget.member)
        cycles.append(RequestCycle(request.id, nodes, levels, 1 + hits, *told))

    def about(seconds: float) -> float:
        return seconds * max(0.3, rng.gauss(1.0, world.noise)) * (3.0 if rng.random() < world.stalls else 1.0)

    draft = world.planning / 2 + watched * world.watching + reading
    for price, levels, count in zip(world.drafting, deepest, asks, strict=True):
        draft += (price.fixed + levels * (price.level + price.ask * (count - 1))) if count else 0.0
    draft, verify, sample = about(draft), about(cost.seconds(rows, 1, keys)), about(world.planning / 2)
    return Record(rows, 0, tuple(cycles), draft, verify, sample, draft + verify + sample, keys)


def ramp(most: int, cycles: int) -> Callable[[int], int]:
    """A concurrency that doubles from 1 to `most` and halves back, `cycles` cycles at each step."""
    steps = [1 << power for power in range(most.bit_length())]
    steps += steps[-2::-1]
    return lambda cycle: steps[min(cycle // cycles, len(steps) - 1)]


TWO_CORES = World(
    passes={1: 4.3e-3, 2: 4.6e-3, 4: 5.6e-3, 8: 8.1e-3, 16: 14.8e-3, 32: 27.5e-3, 64: 53.2e-3},
    drafting=(Drafting(fixed=0.05e-3), Drafting(0.3e-3, 0.55e-3, 0.1e-3, 0.05e-3)),
)
"""SmolLM2-135M, packed, on two cores (docs/measurements.md), with lookups and a head of one layer as drafters."""
FLAT = World(
    passes={1: 6.8e-3, 8: 7.5e-3, 16: 8.0e-3, 64: 9.0e-3, 128: 11.5e-3, 256: 12.9e-3},
    drafting=(Drafting(fixed=0.1e-3), Drafting(0.2e-3, 0.45e-3, 0.0, 1e-6)),
)
"""About an 8B model on a GPU, where rows are cheap."""
