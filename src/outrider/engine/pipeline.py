"""Cycles that follow one another on the device: the next one is launched before the last one is read.

They carry all running requests, or none: while one of them reads its prompt, or needs its tokens on the host (a lookup,
a grammar, logprobs, a bias), all run in lockstep, in one pass as ever. Two passes, one for each kind, would read the
weights twice, and that takes longer than what the host does between two cycles.
The host is late by the cycles that are in the air: it holds slots for all that they can bring, cuts what lies behind an
end when it reads it, and gives slots back only when the last cycle that may write to them is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING

from outrider.drafters.base import Ask
from outrider.engine import account
from outrider.engine.device_cycle import DeviceCycle
from outrider.engine.ends import Emission, deliver
from outrider.engine.flight import Aloft, Told
from outrider.engine.guard import guarded
from outrider.engine.outlines import outline_of
from outrider.engine.scheduler import key_of
from outrider.engine.seating import seating
from outrider.errors import CapacityError
from outrider.kernels.warps import Steps
from outrider.models.seats import MUTE, Outline, Seats
from outrider.record import Record
from outrider.request import Request
from outrider.tree import NO_GUESS, Budget

if TYPE_CHECKING:
    from outrider.engine.step import Engine


@dataclass(slots=True)
class _Seat:
    """What the host knows of a seat: columns of its table that the device has, levels that it was allowed, and how many
    of the last known tokens its drafter has yet to read.
    """

    number: int
    blocks: int = 0
    levels: int = MUTE
    unread: int = 1


class Pipeline:
    """Launches cycles on the device and reads them in their order.

    Args:
        in_flight: most cycles in the air; 1 reads each at once, 2 hides the host's work behind the next one.
    """

    def __init__(self, engine: Engine, in_flight: int) -> None:
        self._engine = engine
        self._most = in_flight
        self._air: deque[Aloft] = deque()
        self._taken: dict[Request, _Seat] = {}
        self._grounded: set[int] = set()
        self.landed: Aloft | None = None  # the cycle that was read last
        self._read = 0.0
        self._captured = 0  # graphs that had been taken then
        self._unread = 1  # most tokens of a seat that its drafter has yet to read behind all that is in the air
        scheduler, control, target = engine.scheduler, engine.control, engine.target
        control.rows = scheduler.max_rows
        size = scheduler.ledger.block_size
        widest = control.depth, control.width, control.nodes
        levels, blocks = seating(engine.drafter, *widest, scheduler.max_context, size)
        self.seats = Seats(
            scheduler.max_requests, levels, blocks, size, target.kernels, target.vocab_size, target.device
        )
        self._free = list(range(scheduler.max_requests))[::-1]
        self._cycle = DeviceCycle(engine.target, engine.pages, self.seats)
        if engine.drafter:
            engine.drafter.seat(scheduler.max_requests, levels)

    @property
    def note(self) -> str | None:
        """What a user should know of it."""
        return self._cycle.note

    @property
    def num_captured(self) -> int:
        """Graphs of cycles that were taken until now."""
        return self._cycle.num_captured

    def apart(self, requests: Sequence[Request], outline: Outline) -> dict[str, Callable[[], object]]:
        """Of a cycle of requests in flight: its parts "draft" and "target", and all of it, "device", to be run alone by
        whoever measures them, any number of times. The requests are to be aborted then: others stand on their seats.
        """
        if not self._hold(requests, outline):
            raise CapacityError("memory holds no further cycle of these requests: raise num_slots")
        self._tell_tables(requests)
        seats = [self._taken[request] for request in requests]
        given = [seat.number for seat in seats], outline, max(seat.blocks for seat in seats), self._engine.drafter
        return {**self._cycle.apart(*given), "device": self.seats.unmoved(partial(self._cycle.run, *given))}

    @contextmanager
    def flying_by(self, cycle: DeviceCycle) -> Iterator[None]:
        """For measurements: within this block another kind of cycle runs on the same seats."""
        kept, self._cycle = self._cycle, cycle
        try:
            yield
        finally:
            self._cycle = kept

    def carries(self, request: Request) -> bool:
        """Whether a cycle in the air may write to the request's slots."""
        return any(request in flight.requests for flight in self._air)

    def vacate(self) -> None:
        """Give the seats of requests that are over back, and their slots, once nothing of them is in the air."""
        if not self._engine.scheduler.running:
            self._air.clear()  # nobody waits for it, and what is launched from now on comes behind it
        for request in [request for request in self._taken if request.is_finished]:
            if not self.carries(request):
                self._leave(request)

    def fly(self) -> bool:
        """Launch what may be launched; False where nothing is in the air, and the next pass is one in lockstep."""
        while len(self._air) < self._most and self._launch():
            pass
        if not self._air:
            self._land()
        return bool(self._air)

    def collect(self) -> tuple[list[Emission], Record]:
        """Read the oldest cycle, commit what was accepted, and deliver it token by token."""
        engine, flight = self._engine, self._air.popleft()
        self.landed = flight
        told = flight.told.read()
        emissions = [self._settle(flight, request, row) for request, row in zip(flight.requests, told, strict=False)]
        now, captured = time.perf_counter(), self.num_captured
        seconds, captures = now - max(flight.started, self._read), captured != self._captured
        record = account.flown(flight, emissions, told, seconds, engine.economy, captures)
        self._read, self._captured = now, captured
        over = [emission.request for emission in emissions if emission.tokens and emission.request.finish_reason]
        for request in over:
            assert request.finish_reason is not None
            engine._finish(request, request.finish_reason)
        record = engine.control.learn(record)
        for request in over:
            engine._forget(request)
        self.vacate()
        return [emission for emission in emissions if emission.tokens], record

    def _launch(self) -> bool:
        """Send the next cycle; False where none may go."""
        engine = self._engine
        requests = self._crew()
        if not requests:
            return False
        budgets = engine.control.outlined(requests) if engine.drafter else {}
        outline = outline_of(engine, len(requests), budgets.values(), self.seats.levels, self._unread)
        if outline is not None:
            outline = replace(outline, steps=self._steps(requests))
        if outline is None or not self._cycle.fits(len(requests), outline) or not self._hold(requests, outline):
            return False
        if not self._board(requests, budgets, outline) or (outline.depth and not engine.drafter):  # it failed just now
            return False
        started, told = time.perf_counter(), None
        with guarded(engine):
            seats = [self._taken[request] for request in requests]
            blocks = max(seat.blocks for seat in seats)
            told = Told(self._cycle.run([seat.number for seat in seats], outline, blocks, engine.drafter))
        if told is None:
            return False
        self._air.append(Aloft(tuple(requests), outline, budgets, told, started))
        self._unread = self._unread + 1 if outline.lags else outline.depth + 1
        return True

    def _crew(self) -> list[Request]:
        """All that run and do not surely end with what is in the air; nobody where one of them cannot fly."""
        scheduler = self._engine.scheduler
        if scheduler.admits or not all(self._can_fly(request) for request in scheduler.running):
            return []
        return [r for r in scheduler.running if len(r.output) + self._num_aloft(r) < r.limit]

    def _can_fly(self, request: Request) -> bool:
        """Whether the device alone can say what comes next."""
        engine, params = self._engine, request.params
        if not request.output or engine.scheduler.num_pending(request) > 1 or request.id in self._grounded:
            return False
        context = engine._contexts[request.id]
        if params.logprobs is not None or params.trace:
            return False
        if context.warps(context.position) and not (self.seats.laws and context.warps_by_fields(context.position)):
            return False
        if params.width is not None:  # trees on the device have one outline for all
            return False
        return engine.acceptance == "match" or context.temperature == 0

    def _steps(self, requests: Sequence[Request]) -> Steps | None:
        """How the rows of these requests are warped."""
        contexts = [self._engine._contexts[request.id] for request in requests]
        warped = [context.fields.steps for context in contexts if context.warps(context.position)]
        return reduce(or_, warped, Steps()).in_general()

    def _num_aloft(self, request: Request) -> int:
        return sum(request in flight.requests for flight in self._air)

    def _hold(self, requests: Sequence[Request], outline: Outline) -> bool:
        """Hold slots for all that is in the air and this cycle; False where memory does not suffice."""
        engine = self._engine
        scratch = engine.drafter.needs.num_scratch(outline.depth, outline.width) if engine.drafter else 0
        for request in requests:
            ahead = sum(flight.outline.depth + 1 for flight in self._air if request in flight.requests)
            known = min(request.num_tokens + ahead, len(request.prompt) + request.limit - 1)
            slots = known + outline.nodes + scratch
            room = self.seats.most_blocks * engine.ledger.block_size
            if slots > room or not engine.ledger.reserve(key_of(request), slots):
                return False
        return True

    def _board(self, requests: Sequence[Request], budgets: Mapping[int, Budget], outline: Outline) -> bool:
        """Let every request sit down, and tell the device what has changed; False where that must wait for the air."""
        engine, drafter = self._engine, self._engine.drafter
        levels: dict[Request, int] = {}
        for request in requests:
            seat, budget = self._taken.get(request), budgets.get(request.id, NO_GUESS)
            reads = bool(drafter and (drafter.needs.taps or (seat is not None and seat.levels >= 0)))
            follows = outline.depth or outline.reads or outline.lags
            levels[request] = min(budget.depth, outline.depth) if follows and (reads or budget.depth) else MUTE
        new = [r for r in requests if r not in self._taken or (levels[r] >= 0 and self._taken[r].levels < 0)]
        if new and self._air:
            return False
        for request in new:
            self._sit_down(request)
        readers = [request for request in new if levels[request] >= 0]
        if readers and drafter:
            spans = [engine.ledger[key_of(request)] for request in readers]
            with guarded(engine):
                asks = [
                    Ask(request, engine._contexts[request.id], NO_GUESS, span.table, span.seen.get(drafter.name, 0))
                    for request, span in zip(readers, spans, strict=True)
                ]
                drafter.board(asks, [self._taken[request].number for request in readers])
        changed = [request for request in requests if self._taken[request].levels != levels[request]]
        if changed:
            self.seats.allow([self._taken[r].number for r in changed], [levels[r] for r in changed])
        for request in requests:
            self._taken[request].levels = levels[request]
        self._tell_tables(requests)
        return True

    def _tell_tables(self, requests: Sequence[Request]) -> None:
        """The device learns what its tables have become longer by."""
        for request in requests:
            seat, table = self._taken[request], self._engine.ledger[key_of(request)].table
            if len(table) > seat.blocks:
                self.seats.extend(seat.number, seat.blocks, table[seat.blocks :])
                seat.blocks = len(table)

    def _sit_down(self, request: Request) -> None:
        """What is known of a request goes to the device; nothing of it is in the air."""
        seat = self._taken.get(request)
        number = self._free.pop() if seat is None else seat.number
        self._taken[request] = _Seat(number)
        context = self._engine._contexts[request.id]
        self.seats.take(
            number,
            length=request.num_tokens,
            end=len(request.prompt) + request.limit,
            prompt=len(request.prompt),
            seed=context.seed_bits,
            sample=request.sample,
            heat=context.temperature,
            token=request.output[-1],
        )
        if self.seats.laws:
            self.seats.laws.take(number, context.fields, context.said(), self.seats.sent)

    def _settle(self, flight: Aloft, request: Request, told: Sequence[int]) -> Emission:
        """Deliver what one request said; nothing of one that is over already."""
        engine, seat = self._engine, self._taken[request]
        *said, accepted, _, _ = told
        if request.is_finished:
            return Emission(request, (), 0)
        if said[0] < 0:  # no law: in lockstep the same row tells why
            self._grounded.add(request.id)
            return Emission(request, (), 0)
        key, known = key_of(request), request.num_tokens
        emission = deliver(request, said[: accepted + 1], None, engine._texts.get(request.id))
        committed = known + emission.num_accepted
        engine.ledger.draft(key, 1 + flight.outline.nodes)
        tokens = request.tokens(0, committed) if engine.ledger.fills_block(key, committed) else ()
        engine.ledger.commit(key, tokens, committed)
        drafter, outline = engine.drafter, flight.outline
        has_read = outline.reads or (outline.depth and flight.budgets.get(request.id))
        seat.unread = seat.unread + 1 if outline.lags else accepted + 1
        if drafter and drafter.needs.stack and has_read:
            engine.ledger.saw(key, drafter.name, known)
        return emission

    def _land(self) -> None:
        """All stand up; their drafter goes on by way of the host."""
        self._unread = 1
        for request in list(self._taken):
            self._leave(request)
        self._grounded &= self._engine._contexts.keys()

    def _leave(self, request: Request) -> None:
        """A request, nothing of which is in the air, gives its seat back, and its slots where it is over."""
        engine, seat = self._engine, self._taken.pop(request)
        self._free.append(seat.number)
        if request in engine.scheduler.departing:
            engine.scheduler.release(request)
        elif not request.is_finished and seat.levels >= 0:
            with guarded(engine):
                if engine.drafter:
                    engine.drafter.leave(request, seat.number, seat.unread)
