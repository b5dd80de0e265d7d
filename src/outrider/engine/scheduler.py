"""Who runs in this pass, with how many rows and slots. No torch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outrider.cache.ledger import TARGET_SEQUENCE, Key, Ledger
from outrider.drafters.base import Needs
from outrider.engine.shares import Line, ranked, rations, yielding
from outrider.errors import CapacityError
from outrider.request import FinishReason, Phase, Request
from outrider.tree import NO_GUESS, Budget

PROMPT_LOGPROB_ROWS = 64
"""Most rows a chunk of a prompt whose every logit row is wanted: a row is a whole vocabulary wide."""


def key_of(request: Request) -> Key:
    return (request.id, TARGET_SEQUENCE)


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a pass: `num_rows` known tokens from `start` on, then at most `budget.nodes` guesses.

    Attributes:
        draws: the last known token's row is among them, so the pass yields a token.
        is_cycle: it is a decode pass of this request; the prefill's token belongs to none.
        node_slots: slots of the guesses, in the target's stack. scratch: slots for the drafter's own guesses.
        probes: how many rows the drafter may only look at, and how deep. probe_slots: theirs, behind all others.
    """

    request: Request
    start: int
    num_rows: int
    draws: bool
    is_cycle: bool
    budget: Budget = NO_GUESS
    node_slots: tuple[int, ...] = ()
    scratch: tuple[int, ...] = ()
    probes: Budget = NO_GUESS
    probe_slots: tuple[int, ...] = ()

    @property
    def tells_prompt(self) -> bool:
        """Every row's logits are wanted, for `prompt_logprobs`."""
        return self.request.params.prompt_logprobs is not None and not self.request.output


@dataclass(frozen=True, slots=True)
class Plan:
    """The works of one pass, and who got or lost slots on the way to it."""

    works: tuple[Work, ...]
    admitted: tuple[Request, ...]
    preempted: tuple[Request, ...]


@dataclass(slots=True)
class _Draft:
    """A plan in the making: the rows that are left, how many of them guesses may have, and who had how many."""

    rows: int
    spare: int
    works: list[Work] = field(default_factory=list)
    lost: list[Request] = field(default_factory=list)
    had: Counter[str] = field(default_factory=Counter)

    def add(self, work: Work) -> int:
        """Returns the known tokens among its rows."""
        self.works.append(work)
        rows = work.num_rows + work.budget.nodes
        self.rows -= rows
        self.spare -= work.budget.nodes
        self.had[work.request.client] += rows
        return work.num_rows


class Scheduler:
    """Decoding rows first, then prompts in chunks; short of slots, one is preempted.

    Seats and rows go in equal shares to clients (`shares`), and slots are taken from the newest of whoever runs most;
    with one client all of this is first come, first served.

    Args:
        needs: the drafter's, for its scratch slots.
    """

    def __init__(self, ledger: Ledger, needs: Needs, max_requests: int, max_rows: int, max_context: int) -> None:
        self.ledger = ledger
        self.needs = needs
        self.max_requests = max_requests
        self.max_rows = max_rows
        self.max_context = max_context
        self.waiting = Line()
        self.running: list[Request] = []
        self.departing: list[Request] = []
        """Over, but a pass that may still write to their slots is under way."""
        self.num_preemptions = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running and not self.departing

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def num_pending(self, request: Request) -> int:
        """Known tokens without keys in the target's stack; 1 while decoding."""
        return request.num_tokens - self.ledger[key_of(request)].committed

    def decoding(self) -> list[Request]:
        """Running requests whose next pass may carry guesses."""
        return [request for request in self.running if request.output and self.num_pending(request) == 1]

    def plan(self, budgets: Mapping[int, Budget]) -> Plan:
        """Choose rows and hold slots for them; `budgets` by request id, none meaning depth 0."""
        before = frozenset(self.running)
        admitted, lost = self._admit()
        draft = _Draft(self.max_rows, self.max_rows - len(self.running), lost=lost)  # guesses leave everyone a row
        reading: list[Request] = []
        decoding: list[Request] = []
        for request in ranked(self.running):
            (reading if self.num_pending(request) > 1 else decoding).append(request)
        for request in decoding:
            self._place(draft, request, budgets.get(request.id, NO_GUESS), draft.rows)
        for _, level in itertools.groupby(reading, key=lambda request: request.priority):
            self._read(draft, [request for request in level if request.phase is Phase.RUNNING])
        works = draft.works
        if self.needs.extra_rows:
            works = self._probing(works, budgets, draft.rows)
        # One that was admitted and preempted in the same breath never began.
        began = tuple(r for r in dict.fromkeys(admitted) if r.phase is Phase.RUNNING)
        return Plan(tuple(works), began, tuple(r for r in dict.fromkeys(lost) if r in before))

    def _read(self, draft: _Draft, requests: list[Request]) -> None:
        """Chunks of prompts, as many rows as their clients' shares of the pass allow."""
        wanted: Counter[str] = Counter()
        for request in requests:
            wanted[request.client] += self.num_pending(request)
        left = rations(draft.rows, wanted, draft.had)
        for request in requests:
            left[request.client] -= self._place(draft, request, NO_GUESS, left[request.client])

    def _place(self, draft: _Draft, request: Request, budget: Budget, rows: int) -> int:
        """Plan a request's work, of at most `rows` known tokens, whoever must be preempted for it; returns how many."""
        if request.phase is not Phase.RUNNING or rows == 0:
            return 0
        work = self._fit(request, budget, rows, draft.spare)
        while work is None:
            victim = self._victim(request, draft.works)
            self._preempt(victim)
            draft.lost.append(victim)
            if victim is request:
                return 0
            work = self._fit(request, budget, rows, draft.spare)
        return draft.add(work)

    def finish(self, request: Request, reason: FinishReason, is_aloft: bool = False) -> None:
        """The request is over: its slots return at once, or, while a pass `is_aloft` with it, by `release`."""
        if request.phase is Phase.RUNNING:
            self.running.remove(request)
            if is_aloft:
                self.departing.append(request)
            else:
                self.ledger.close(key_of(request))
        elif request.phase is Phase.WAITING and request in self.waiting:
            self.waiting.remove(request)
        request.phase = Phase.FINISHED
        request.finish_reason = reason

    def release(self, request: Request) -> None:
        """The last pass with a request that is over has ended: its slots return."""
        self.departing.remove(request)
        self.ledger.close(key_of(request))

    @property
    def admits(self) -> bool:
        """Whether a request that waits can start in the next pass."""
        request = self.waiting.first(self.running)
        return request is not None and (self._has_room(request) or yielding(request, self.running) is not None)

    def _has_room(self, request: Request) -> bool:
        """Whether there is a seat, and slots for all of the prompt beside what those that run have yet to write and a
        block more of each: half a prompt would hold slots for nothing, and soon be preempted.
        """
        if len(self.running) >= self.max_requests:
            return False
        size = self.ledger.block_size
        owed = sum(self.ledger.num_missing(key_of(one), one.num_tokens + size) for one in self.running)
        return not self.running or owed - (-(request.num_tokens + 1) // size) <= self.ledger.pool.num_available

    def _admit(self) -> tuple[list[Request], list[Request]]:
        """Let start who can, in their turns; returns them, and those that had more than their share and gave way."""
        admitted: list[Request] = []
        lost: list[Request] = []
        while (request := self.waiting.first(self.running)) is not None:
            if self._has_room(request):
                self._start(request)
                admitted.append(request)
            elif (victim := yielding(request, self.running)) is not None:
                self._preempt(victim)
                lost.append(victim)
            else:
                break
        return admitted, lost

    def _start(self, request: Request) -> None:
        self.waiting.take(request)
        reuse = request.params.prompt_logprobs is None or bool(request.output)
        cached = self.ledger.open(key_of(request), request.tokens(0, request.num_tokens), reuse)
        if request.num_cached is None:  # after a preemption it would find its own keys
            request.num_cached = cached
        request.phase = Phase.RUNNING
        self.running.append(request)

    def _fit(self, request: Request, budget: Budget, rows: int, spare: int) -> Work | None:
        """Hold slots for this request's next rows (at most `rows` known tokens or `spare` guesses), guessing less where
        memory is short; None: no slots."""
        key = key_of(request)
        span = self.ledger[key]
        pending = request.num_tokens - span.committed
        if pending > 1 or not request.output:
            limit = rows if request.params.prompt_logprobs is None else min(rows, PROMPT_LOGPROB_ROWS)
            count = min(pending, limit)
            if not self.ledger.reserve(key, span.committed + count):
                return None
            draws = count == pending
            return Work(request, span.committed, count, draws, is_cycle=draws and bool(request.output))
        for allowed in (self._clamp(request, budget, spare), NO_GUESS):
            scratch = self.needs.num_scratch(allowed.depth, allowed.width)
            if self.ledger.reserve(key, span.committed + 1 + allowed.nodes + scratch):
                first = span.committed + 1
                slots = self.ledger.slots(key, first, first + allowed.nodes + scratch)
                nodes, rest = tuple(slots[: allowed.nodes]), tuple(slots[allowed.nodes :])
                return Work(request, span.committed, 1, True, True, allowed, nodes, rest)
        return None

    def _probing(self, works: list[Work], budgets: Mapping[int, Budget], rows: int) -> list[Work]:
        """Give probes what is left when all is planned: `rows`, and slots of which nobody will be short for them."""
        planned = []
        for work in works:
            key, behind = key_of(work.request), work.start + work.num_rows + len(work.node_slots) + len(work.scratch)
            count = min(rows, budgets.get(work.request.id, NO_GUESS).probes) if work.is_cycle else 0
            missing = self.ledger.num_missing(key, behind + count)
            depth = self._room(work.request)
            if count and depth and self.ledger.pool.num_available >= missing + len(self.running):
                self.ledger.reserve(key, behind + count)
                slots = tuple(self.ledger.slots(key, behind, behind + count))
                work = replace(work, probes=Budget(depth, count, count), probe_slots=slots)
                rows -= count
            planned.append(work)
        return planned

    def _room(self, request: Request) -> int:
        """Levels that a guess may have before the request's limit or the end of the context."""
        return max(0, min(request.limit - len(request.output), self.max_context - request.num_tokens) - 1)

    def _clamp(self, request: Request, budget: Budget, spare: int) -> Budget:
        """No guess past the request's limit or the context, and no more nodes than rows are spare."""
        depth = min(budget.depth, self._room(request))
        nodes = min(budget.nodes, spare)
        return replace(budget, depth=depth, nodes=nodes) if depth and nodes > 0 else NO_GUESS

    def _victim(self, request: Request, works: list[Work]) -> Request:
        planned = {work.request.id for work in works}
        for candidate in reversed(ranked(self.running)):
            if candidate.id not in planned and candidate is not request:
                return candidate
        if len(self.running) == 1:
            raise CapacityError(
                f"a request of {request.num_tokens} tokens does not fit into the key-value slots: "
                "raise num_slots or lower max_context"
            )
        return request

    def _preempt(self, request: Request) -> None:
        """Give its slots back; it starts again at the head of its client's line, and writes the same keys again."""
        self.num_preemptions += 1
        self.running.remove(request)
        self.ledger.close(key_of(request))
        request.phase = Phase.WAITING
        self.waiting.put_back(request)
