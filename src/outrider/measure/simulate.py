"""A world without a model: the real control, cascade and trees over recorded texts and modelled costs.

What is replayed is what the engine runs (`Control`, `Cascade`, `Ngram`, `Trees` with its tables of outcomes); only the
passes are replaced, by what they said and what they cost. On 24 prompts its ratios were those of the engine within a
few per cent (docs/measurements.md).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from outrider.control.cost import PassCost
from outrider.control.depth import Control
from outrider.drafters.base import Ask, Commit, Drafter, Needs, Workshop
from outrider.drafters.candidates import Candidate, Candidates, Place
from outrider.drafters.cascade import Cascade
from outrider.drafters.ngram import Ngram
from outrider.drafters.trees import Level, Trees
from outrider.drafters.weights import Q_STEPS, TRUST, Weights
from outrider.measure.traces import Node, Trace
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.record import Record, RequestCycle
from outrider.request import Request, SamplingParams
from outrider.sampling.context import Context
from outrider.tree import EMPTY_TREE, ROOT, Budget, DraftTree

MS = 1e-3


@dataclass(frozen=True, slots=True)
class World:
    """What things cost, in seconds.

    Attributes:
        cost: of passes. first, level, row: of a guess, of every further level of it, of every row beyond a level's
            first. reading: of a token that the drafter has yet to read. around: of plan, draw and books; watching: of
            a request's grade and budget. drawn: of an accepted token that is drawn with noise. prefill: of a token of
            a prompt.
        noise: relative standard deviation of what is measured; what a run took is counted without it.
    """

    cost: PassCost
    first: float
    level: float
    row: float
    reading: float
    around: float
    watching: float
    drawn: float
    prefill: float
    noise: float = 0.04


ONE_CORE = World(
    PassCost(
        {1: 10.0 * MS, 2: 10.9 * MS, 4: 13.0 * MS, 8: 17.2 * MS, 16: 29.0 * MS, 32: 57.0 * MS, 64: 118.0 * MS},
        key=6.3e-6,
        row_key=2.1e-6,
    ),
    *(2.4 * MS, 1.0 * MS, 0.16 * MS, 0.11 * MS, 0.85 * MS, 0.08 * MS, 0.35 * MS, 1.7 * MS),
)
"""SmolLM2-135M, packed, with its `small_model`, fitted to the records of the engine on one core."""
TWO_CORES = World(
    PassCost(
        {1: 4.3 * MS, 2: 4.6 * MS, 4: 5.6 * MS, 8: 8.1 * MS, 16: 14.8 * MS, 32: 27.5 * MS, 64: 53.2 * MS},
        key=3e-6,
        row_key=1e-6,
    ),
    *(0.7 * MS, 0.4 * MS, 0.06 * MS, 0.04 * MS, 0.45 * MS, 0.08 * MS, 0.15 * MS, 1.0 * MS),
)
"""The same on two (docs/measurements.md has the passes); drafting is scaled from one core."""


class Policy(Protocol):
    """What `Control` is to the engine."""

    def looks(self, requests: Sequence[Request]) -> bool: ...

    def budget(self, requests: Sequence[Request], grades: dict[int, int | None]) -> dict[int, Budget]: ...

    def learn(self, record: Record) -> None: ...

    def forget(self, request: Request) -> None: ...


class Plain:
    """Never guesses."""

    def looks(self, requests: Sequence[Request]) -> bool:
        return False

    def budget(self, requests: Sequence[Request], grades: dict[int, int | None]) -> dict[int, Budget]:
        return {}

    def learn(self, record: Record) -> None: ...

    def forget(self, request: Request) -> None: ...


@dataclass(slots=True)
class _Told:
    """A request's side of sampling, as far as drafters ask."""

    request: Request

    @property
    def temperature(self) -> float:
        return self.request.params.temperature

    @property
    def position(self) -> int:
        return len(self.request.output)


class _Recorded:
    """Ranks candidates as they were recorded, with weights that learn as the real ones do."""

    def __init__(self) -> None:
        self.traces: dict[int, Trace] = {}
        self._tables = {False: Weights(Q_STEPS), True: Weights(Q_STEPS)}

    def best(
        self, logits: Tensor, places: Sequence[Place], width: int, trust: Sequence[float] | None = None
    ) -> list[list[Candidate]]:
        return [self._children(place)[:width] for place in places]

    def first(self, logits: Tensor, places: Sequence[Place]) -> list[list[Candidate]]:
        return self.best(logits, places, 1)

    def _children(self, place: Place) -> list[Candidate]:
        nodes = self.traces[place.context.request.id].moments.get(place.context.position, ())
        at: int | None = ROOT
        for token in place.path:
            at = next((number for number, node in enumerate(nodes) if node[:2] == (token, at)), None)
        table = self._tables[place.context.temperature > 0]
        return [_candidate(node, table) for node in nodes if node[1] == at]


def _candidate(node: Node, table: Weights) -> Candidate:
    token, _, prior, rank, cell = node
    weight = min(1.0, prior * (table._hits[cell] + TRUST) / (table._expected[cell] + TRUST))
    return Candidate(token, weight, prior, rank, cell, table)


class Recorded(Drafter):
    """A drafter that ranks, played back. levels, rows: of the last proposal; asked: who wanted it."""

    name = "recorded"
    needs = Needs(ranks=True, width=3)

    def __init__(self) -> None:
        self.candidates = _Recorded()
        self.trees = Trees(cast(Candidates, self.candidates), "match")
        self.clear()

    def clear(self) -> None:
        self.levels = self.rows = 0
        self.asked: list[Request] = []

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        self.levels, self.asked = 1, [ask.request for ask in asks]

        def expand(level: Level) -> tuple[Tensor, None]:
            self.levels += 1
            self.rows += len(level.asks) - 1
            return torch.zeros(len(level.asks), 1), None

        return self.trees.grow(asks, torch.zeros(len(asks), 1), expand)

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        self.trees.observe(commits)

    def end(self, request: Request) -> None:
        self.trees.end(request)


@dataclass(slots=True)
class Told:
    """What came of one text: seconds of its prompt and of every cycle it took part in, guesses asked for, cycles."""

    trace: Trace
    seconds: float
    asked: int = 0
    cycles: int = 0


class Simulation:
    """Decodes traces in a world, under control's policy (None: adaptive control over the world's costs).

    Attributes:
        seconds: of all passes. cycles: of each, how many decoded, how many asked the drafter, and its seconds.
    """

    def __init__(self, world: World, policy: Policy | None = None, seed: int = 0) -> None:
        self.world = world
        cost = PassCost(world.cost.table(), world.cost.key, world.cost.row_key)
        self.policy = policy or Control(cost, None, Recorded.needs.width, ranks=True)
        self.model = Recorded()
        self.drafter = Cascade(Ngram(cast(Workshop, None)), self.model)
        self.seconds = 0.0
        self.cycles: list[tuple[int, int, float]] = []
        self._rng = random.Random(seed)
        self._read: dict[int, int] = {}
        self._number = 0

    def run(self, traces: Sequence[Trace], concurrency: int | Callable[[int], int] = 1) -> list[Told]:
        """One a trace, in their order. concurrency: how many at once, or by how many have begun; those that run end
        first.
        """
        most = concurrency if callable(concurrency) else lambda _: concurrency
        told = [Told(trace, len(trace.prompt) * self.world.prefill) for trace in traces]
        waiting, live = told[::-1], list[tuple[Request, Told]]()
        while waiting or live:
            while waiting and len(live) < most(len(traces) - len(waiting)):
                live.append((self._begin(waiting[-1].trace), waiting.pop()))
            self._cycle(live)
            for request, each in live:
                if len(request.output) >= len(each.trace.output):
                    self.drafter.end(request)
                    self.policy.forget(request)
                    del self.model.candidates.traces[request.id], self._read[request.id]
            live = [(request, each) for request, each in live if request.id in self._read]
        return told

    def _begin(self, trace: Trace) -> Request:
        params = SamplingParams(temperature=trace.temperature, max_tokens=max(2, len(trace.output)))
        request = Request(self._number, trace.prompt, params, 0, limit=160)
        self._number += 1
        request.output.append(trace.output[0])  # prefill's
        self.model.candidates.traces[request.id] = trace
        self._read[request.id] = 0
        self.drafter.begin(request)
        return request

    def _cycle(self, live: Sequence[tuple[Request, Told]]) -> None:
        requests = [request for request, _ in live]
        looks = self.policy.looks(requests)
        grades = {request.id: self.drafter.grade(request) for request in requests} if looks else {}
        budgets = self.policy.budget(requests, grades) if looks else {}
        asks = [Ask(r, cast(Context, _Told(r)), budgets[r.id]) for r in requests if r.id in budgets]
        self.model.clear()
        trees = dict(zip((ask.request.id for ask in asks), self.drafter.propose(asks) if asks else [], strict=True))
        draft = self._drafting(looks * len(requests))
        cycles, commits, rows, keys, accepted = [], [], 0, 0, 0
        for request, told in live:
            tree, budget = trees.get(request.id, EMPTY_TREE), budgets.get(request.id, Budget())
            rows, keys = rows + 1 + len(tree), keys + (1 + len(tree)) * request.num_tokens
            said = _said(tree, told.trace.output[len(request.output) :])
            accepted += len(said) - 1
            request.output += said
            asked = budget.grade, budget.nodes > 0, tree.promise if len(tree) else 0.0
            cycles.append(RequestCycle(request.id, len(tree), max(tree.depths(), default=0), len(said), *asked))
            commits.append(Commit(request, len(said), 0, (0,)))
            told.asked, told.cycles = told.asked + asked[1], told.cycles + 1
        verify = self.world.cost.seconds(rows, len(live), keys / rows)
        settle = self.world.around / 2 + accepted * self.world.drawn * (live[0][1].trace.temperature > 0)
        self.drafter.observe(cast(FlatBatch, None), cast(TargetOutput, None), commits)
        d, v, s = (part * max(0.5, self._rng.gauss(1, self.world.noise)) for part in (draft, verify, settle))
        self.policy.learn(Record(rows, 0, tuple(cycles), d, v, s, d + v + s, keys))
        self.seconds += draft + verify + settle
        self.cycles.append((len(live), len(self.model.asked), draft + verify + settle))
        for _, told in live:
            told.seconds += draft + verify + settle

    def _drafting(self, watched: int) -> float:
        """Seconds before the pass, after `watched` grades."""
        world, model = self.world, self.model
        seconds = world.around / 2 + watched * world.watching
        if model.asked:
            unread = sum(request.num_tokens - self._read[request.id] for request in model.asked)
            self._read |= {request.id: request.num_tokens for request in model.asked}
            seconds += world.first + world.level * (model.levels - 1)
            seconds += world.reading * (unread - 1) + world.row * (model.rows + len(model.asked) - 1)
        return seconds


def _said(tree: DraftTree, coming: Sequence[int]) -> list[int]:
    """The accepted path and the token that the target adds, within what is to come."""
    children = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node: int | None = ROOT
    said = []
    for token in coming:
        said.append(token)
        node = children.get((node, token)) if node is not None else None
        if node is None:
            break
    return said
