"""START READING HERE: one cycle (plan, draft, verify, commit), repeated; there is no other generate loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from outrider.cache.ledger import Ledger
from outrider.cache.pages import Pages
from outrider.control.depth import Control
from outrider.drafters.base import Ask, Commit, Drafter, graded, lawful
from outrider.engine import account
from outrider.engine.economy import Economy, price_of
from outrider.engine.ends import Emission, deliver, fail
from outrider.engine.flight import Flight
from outrider.engine.guard import guarded
from outrider.engine.pipeline import Pipeline
from outrider.engine.scheduler import Plan, Scheduler, Work, key_of
from outrider.engine.text import TextStream
from outrider.engine.told import told
from outrider.errors import DrafterError, OutriderError
from outrider.models.batch import BatchBuilder, FlatBatch, TargetOutput
from outrider.models.target import Target
from outrider.record import Record
from outrider.request import FinishReason, Request
from outrider.sampling import logprobs
from outrider.sampling.context import Context
from outrider.sampling.verify import verify
from outrider.tree import EMPTY_TREE, Budget, DraftTree, Verdict


class Engine:
    """Owns the books of all requests and repeats `step` until they are over.

    Args:
        drafter: None is plain decoding: the same step with empty trees, as after a `fault` of a drafter's.
        acceptance: "match" or "rejection". in_flight: most cycles on the device at once (`pipeline`); 0: each is read
            before the next begins.
    """

    strict = False  # whether a drafter's fault is raised where it is met, for those who look for faults

    def __init__(
        self,
        target: Target,
        pages: Pages,
        scheduler: Scheduler,
        drafter: Drafter | None,
        control: Control,
        acceptance: str = "match",
        in_flight: int = 0,
    ) -> None:
        self.target = target
        self.pages = pages
        self.scheduler = scheduler
        self.ledger: Ledger = scheduler.ledger
        self.drafter = drafter
        self.control = control
        self.acceptance = acceptance
        self.economy = Economy(lambda rows: price_of(self.control, rows)) if drafter else None
        self.fault: DrafterError | None = None
        self._contexts: dict[int, Context] = {}
        self._texts: dict[int, TextStream] = {}
        self.pipeline = (
            Pipeline(self, in_flight) if in_flight and not (drafter and drafter.needs.tokens_on_host) else None
        )

    def add(self, request: Request, text: TextStream | None = None) -> None:
        """Queue a request; `text` where its text is wanted as it comes, or ends it (stop strings).

        Raises:
            RequestError: where a sampling field cannot be honoured exactly.
        """
        self._contexts[request.id] = Context(request, self.target.vocab_size, self.target.device, self.target.kernels)
        if text is not None:
            self._texts[request.id] = text
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request between two cycles, and no other; its slots return at once, or with its last cycle aloft."""
        if not request.is_finished:
            self._finish(request, FinishReason.ABORT)
            self._forget(request)

    @contextmanager
    def always_guessing(self, depth: int, width: int | None = None, apart: bool = False) -> Iterator[None]:
        """For tests of exactness: every decode pass guesses `depth` levels, whether that pays or not, and a drafter's
        fault is raised, also one that was told before.

        width: most children of one node (None: as many as control would). apart: control learns nothing from it.
        """
        if self.fault is not None:
            raise self.fault
        chosen, strict = self.control, self.strict
        nodes = max(depth, chosen.nodes)
        depth, wide = depth if self.drafter else 0, width or chosen.width
        self.control = Control(chosen.cost, depth, wide, nodes, adaptive=False, extra_rows=chosen.extra_rows)
        self.control.prices = chosen.prices.copy() if apart else chosen.prices  # what these cost is learnt, too
        self.strict = True
        try:
            yield
        finally:
            self.control, self.strict = chosen, strict

    def step(self) -> tuple[list[Emission], Record]:
        """One cycle for all running requests: what each delivered, and what it cost.

        Where none of them needs its tokens on the host, the next cycle is on the device before this one is read.
        """
        if self.pipeline is not None and self.pipeline.fly():
            return self.pipeline.collect()
        return self.collect(self.launch())

    def launch(self) -> Flight:
        """Plan, draft, and run the target over known tokens and guesses at once."""
        started = time.perf_counter()
        budgets = self._budgets()
        weighed = time.perf_counter() - started
        plan = self.scheduler.plan(budgets)
        self._begin(plan)
        trees = self._propose(plan.works)
        probes = self._probe(plan.works)
        batch, starts = self._build(plan.works, trees, probes)
        drafted = time.perf_counter()
        output = self.target.forward(batch, self.pages, taps=self.drafter.needs.taps if self.drafter else ())
        verified = time.perf_counter()
        return Flight(
            plan, trees, probes, starts, batch, output, started, drafted - started, verified - drafted, weighed
        )

    def collect(self, flight: Flight) -> tuple[list[Emission], Record]:
        """Verify, commit what was accepted, and deliver it token by token."""
        began = time.perf_counter()
        verdicts = self._verify(flight)
        emissions = [self._settle(verdict, flight, index) for index, verdict in enumerate(verdicts)]
        commits = self._commit(flight, verdicts, emissions)
        committed = time.perf_counter()
        self._observe(flight, commits)
        books = flight.seconds_budgets + time.perf_counter() - committed
        for emission in emissions:
            if emission.request.finish_reason is not None:
                self._finish(emission.request, emission.request.finish_reason)
        ended = time.perf_counter()
        record = account.record(flight, emissions, ended - began, ended - flight.started, books, self.economy)
        record = self.control.learn(record)
        for emission in emissions:
            if emission.request.is_finished:
                self._forget(emission.request)
        return [e for e in emissions if e.tokens or e.request.is_finished], record

    def _budgets(self) -> dict[int, Budget]:
        decoding, grades = self.scheduler.decoding(), {}
        if self.drafter is None or not self.control.looks(decoding):
            return {}
        with guarded(self):
            grades = {request.id: graded(self.drafter, request) for request in decoding}
        return self.control.budget(decoding, grades) if self.drafter else {}

    def _begin(self, plan: Plan) -> None:
        for request in plan.admitted:
            if not request.output:
                request.prompt_logprobs.clear()  # a prompt that starts again tells them again
        with guarded(self):
            if self.drafter:
                for request in plan.preempted:
                    self.drafter.end(request)
                for request in plan.admitted:
                    self.drafter.begin(request)

    def _propose(self, works: Sequence[Work]) -> tuple[DraftTree, ...]:
        """One tree a work, empty where nothing is to be guessed."""
        asks = {index: self._ask(work, work.budget) for index, work in enumerate(works) if work.budget.nodes}
        return self._answers(asks, self.drafter.propose, len(works)) if self.drafter else (EMPTY_TREE,) * len(works)

    def _probe(self, works: Sequence[Work]) -> tuple[DraftTree, ...]:
        """One tree a work that is only looked at."""
        asks = {index: self._ask(work, work.probes) for index, work in enumerate(works) if work.probe_slots}
        return self._answers(asks, self.drafter.probe, len(works)) if self.drafter else (EMPTY_TREE,) * len(works)

    def _ask(self, work: Work, budget: Budget) -> Ask:
        span = self.ledger[key_of(work.request)]
        seen = span.seen.get(self.drafter.name, 0) if self.drafter else 0
        return Ask(work.request, self._contexts[work.request.id], budget, span.table, seen, work.scratch)

    def _answers(
        self, asks: dict[int, Ask], answer: Callable[[Sequence[Ask]], list[DraftTree]], num_works: int
    ) -> tuple[DraftTree, ...]:
        """Trees by work; nobody is asked for nothing."""
        trees: dict[int, DraftTree] = {}
        with guarded(self):
            if asks and self.drafter:
                given, vocab_size = list(asks.values()), self.target.vocab_size
                trees = dict(zip(asks, lawful(self.drafter.name, given, answer(given), vocab_size), strict=True))
        return tuple(trees.get(index, EMPTY_TREE) for index in range(num_works))

    def _build(
        self, works: Sequence[Work], trees: Sequence[DraftTree], probes: Sequence[DraftTree]
    ) -> tuple[FlatBatch, tuple[int, ...]]:
        """Of each work: known tokens, then the guesses, then the probes."""
        builder = BatchBuilder(self.ledger.block_size)
        starts = []
        for work, tree, probe in zip(works, trees, probes, strict=True):
            request = work.request
            starts.append(builder.num_logit_rows)
            self.ledger.draft(key_of(request), work.num_rows + len(tree))
            builder.request(self.ledger[key_of(request)].table)
            wanted = work.num_rows if work.tells_prompt else int(work.draws)
            builder.line(work.start, request.tokens(work.start, work.start + work.num_rows), wanted)
            for nodes, slots in ((tree, work.node_slots), (probe, work.probe_slots)):
                if nodes.tokens:
                    builder.tree(work.start + work.num_rows, nodes.tokens, nodes.parents, slots[: len(nodes)])
        return builder.build(self.target.device), tuple(starts)

    def _verify(self, flight: Flight) -> list[Verdict | OutriderError | None]:
        """What the target says of each work's tree; None where the pass holds only a part of a prompt."""
        drawing = [index for index, work in enumerate(flight.plan.works) if work.draws]
        works, trees = flight.plan.works, flight.trees
        verdicts: list[Verdict | OutriderError | None] = [None] * len(works)
        found = verify(
            [trees[index] for index in drawing],
            flight.output.logits,
            [self._contexts[works[index].request.id] for index in drawing],
            self.target.kernels,
            self.acceptance,
            [self._root_row(flight, index) for index in drawing],
        )
        for index, verdict in zip(drawing, found, strict=True):
            verdicts[index] = verdict
        return verdicts

    def _commit(
        self, flight: Flight, verdicts: Sequence[Verdict | OutriderError | None], emissions: Sequence[Emission]
    ) -> list[Commit]:
        """Lengths move; an accepted path is compacted in the target's stack where it is not in line already.

        The last delivered token stays without keys even where it was a guess (an end cut the path), so that the next
        prompt finds as much cached as plain decoding leaves behind.
        """
        source: list[int] = []
        target: list[int] = []
        commits: list[Commit] = []
        first = 0  # the work's first row in the batch
        for index, (work, verdict, emission) in enumerate(zip(flight.plan.works, verdicts, emissions, strict=True)):
            tree, probe = flight.trees[index], flight.probes[index]
            key, nodes = key_of(work.request), first + work.num_rows
            path = verdict.path[: emission.num_accepted] if isinstance(verdict, Verdict) else ()
            for place, node in enumerate(path):
                if place != node:
                    source.append(work.node_slots[node])
                    target.append(work.node_slots[place])
            committed = work.start + work.num_rows + len(path)
            known = work.request.tokens(0, committed) if self.ledger.fills_block(key, committed) else ()
            self.ledger.commit(key, known, committed)
            if self.drafter:
                rows = (*range(first, nodes), *(nodes + node for node in path))
                span = self.ledger[key]
                seen = span.seen.get(self.drafter.name, 0)
                behind = self._root_row(flight, index) + 1 + len(tree)
                probes = range(behind, behind + len(probe))
                commits.append(Commit(work.request, len(emission.tokens), work.start, rows, span.table, seen, probes))
            first = nodes + len(tree) + len(probe)
        self.pages.compact(source, target)
        return commits

    def _observe(self, flight: Flight, commits: Sequence[Commit]) -> None:
        """The drafter sees the pass; then its stack's books are brought up to date."""
        if self.drafter is None:
            return
        with guarded(self):
            self.drafter.observe(flight.batch, flight.output, commits)
            for commit in commits if self.drafter.needs.stack else ():
                seen = self.drafter.seen(commit.request)
                if seen is not None:
                    self.ledger.saw(key_of(commit.request), self.drafter.name, seen)

    def _settle(self, verdict: Verdict | OutriderError | None, flight: Flight, index: int) -> Emission:
        """Deliver what the verdict holds; one bad request fails alone."""
        work = flight.plan.works[index]
        request, text = work.request, self._texts.get(work.request.id)
        try:
            if work.tells_prompt:
                self._tell_prompt(work, flight.output, flight.starts[index])
            if verdict is None:
                return Emission(request, (), 0)
            if isinstance(verdict, OutriderError):
                raise verdict
            context, root = self._contexts[request.id], self._root_row(flight, index)
            rows = told(context, flight.trees[index], verdict, flight.output.logits, root)
        except OutriderError as error:
            return fail(request, error, text)
        return deliver(request, verdict.tokens, rows, text)

    def _tell_prompt(self, work: Work, output: TargetOutput, start: int) -> None:
        """Log-probabilities of the prompt's tokens; row i of the logits tells of token i + 1."""
        request = work.request
        if work.start == 0:
            request.prompt_logprobs.append(None)
        following = list(request.prompt[work.start + 1 : work.start + work.num_rows + 1])
        rows = output.logits[start : start + len(following)]
        request.prompt_logprobs += logprobs.of_prompt(rows, following, request.params.prompt_logprobs or 0)

    def _root_row(self, flight: Flight, index: int) -> int:
        """The row of `output.logits` that belongs to the work's last known token."""
        work = flight.plan.works[index]
        return flight.starts[index] + (work.num_rows - 1 if work.tells_prompt else 0)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        with guarded(self):
            if self.drafter:
                self.drafter.end(request)
        is_aloft = self.pipeline is not None and self.pipeline.carries(request)
        self.scheduler.finish(request, reason, is_aloft)
        if self.pipeline is not None:
            self.pipeline.vacate()

    def _forget(self, request: Request) -> None:
        self.control.forget(request)
        self._contexts.pop(request.id, None)
        self._texts.pop(request.id, None)
