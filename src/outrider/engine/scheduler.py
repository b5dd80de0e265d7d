"""Who runs in this pass, with how many rows and slots. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from outrider.cache.ledger import TARGET_SEQUENCE, Key, Ledger
from outrider.drafters.base import Needs
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


class Scheduler:
    """First come, first served: decoding rows first, then prompts in chunks; short of slots, the newest is preempted.

    Args:
        needs: the drafter's, for its scratch slots.
    """

    def __init__(self, ledger: Ledger, needs: Needs, max_requests: int, max_rows: int, max_context: int) -> None:
        self.ledger = ledger
        self.needs = needs
        self.max_requests = max_requests
        self.max_rows = max_rows
        self.max_context = max_context
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.departing: list[Request] = []
        """Over, but a pass that may still write to their slots is under way."""
        self.num_preemptions = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running and not self.departing

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def num_pending(self, request: Request) -> int:
        """Known tokens without keys in the target's stack; 1 while decoding."""
        return request.num_tokens - self.ledger[key_of(request)].committed

    def decoding(self) -> list[Request]:
        """Running requests whose next pass may carry guesses."""
        return [request for request in self.running if request.output and self.num_pending(request) == 1]

    def plan(self, budgets: Mapping[int, Budget]) -> Plan:
        """Choose rows and hold slots for them; `budgets` by request id, none meaning depth 0."""
        admitted = self._admit()
        works: list[Work] = []
        preempted: list[Request] = []
        rows = self.max_rows
        spare = rows - len(self.running)  # guesses leave everyone a row
        for request in sorted(self.running, key=lambda r: self.num_pending(r) > 1):  # stable: decoding first
            if request.phase is not Phase.RUNNING or rows == 0:
                continue
            budget = budgets.get(request.id, NO_GUESS)
            work = self._fit(request, budget, rows, spare)
            while work is None:
                victim = self._victim(request, works)
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
                work = self._fit(request, budget, rows, spare)
            if work is not None:
                works.append(work)
                rows -= work.num_rows + work.budget.nodes
                spare -= work.budget.nodes
        if self.needs.extra_rows:
            works = self._probing(works, budgets, rows)
        # One that was admitted and preempted in the same breath never began.
        began = tuple(r for r in admitted if r not in preempted)
        return Plan(tuple(works), began, tuple(r for r in preempted if r not in admitted))

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
        if not self.waiting or len(self.running) >= self.max_requests:
            return False
        # A prompt starts only where all of it fits beside those that run: half a prompt holds slots for nothing.
        needed = -(-(self.waiting[0].num_tokens + 1) // self.ledger.block_size)
        return not self.running or needed <= self.ledger.pool.num_available

    def _admit(self) -> list[Request]:
        admitted = []
        while self.admits:
            request = self.waiting.popleft()
            reuse = request.params.prompt_logprobs is None or bool(request.output)
            cached = self.ledger.open(key_of(request), request.tokens(0, request.num_tokens), reuse)
            if request.num_cached is None:  # after a preemption it would find its own keys
                request.num_cached = cached
            request.phase = Phase.RUNNING
            self.running.append(request)
            admitted.append(request)
        return admitted

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
        for candidate in reversed(self.running):
            if candidate.id not in planned and candidate is not request:
                return candidate
        if len(self.running) == 1:
            raise CapacityError(
                f"a request of {request.num_tokens} tokens does not fit into the key-value slots: "
                "raise num_slots or lower max_context"
            )
        return request

    def _preempt(self, request: Request) -> None:
        """Give its slots back; it starts again at the head of the queue, and writes the same keys again."""
        self.num_preemptions += 1
        self.running.remove(request)
        self.ledger.close(key_of(request))
        request.phase = Phase.WAITING
        self.waiting.appendleft(request)
