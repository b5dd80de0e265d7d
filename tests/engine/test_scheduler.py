"""The scheduler alone, over a hundred thousand random steps (fault 28), and its rules one by one."""

from __future__ import annotations

import random

import pytest

from outrider.cache.blocks import BlockPool
from outrider.cache.ledger import Ledger
from outrider.drafters.base import Needs
from outrider.engine.scheduler import Plan, Scheduler, key_of
from outrider.errors import CapacityError
from outrider.request import FinishReason, Phase, Request, SamplingParams
from outrider.tree import Budget

BLOCK_SIZE = 4


def make(blocks: int = 40, max_requests: int = 8, max_rows: int = 32, needs: Needs | None = None) -> Scheduler:
    ledger = Ledger(BlockPool(blocks, BLOCK_SIZE))
    return Scheduler(ledger, needs or Needs(scratch_levels=1), max_requests, max_rows, max_context=100)


def ask(number: int, prompt: int, limit: int = 20, client: str = "", priority: int = 0) -> Request:
    return Request(number, tuple(range(prompt)), SamplingParams(), 0, limit=limit, client=client, priority=priority)


def apply(scheduler: Scheduler, plan: Plan, rng: random.Random) -> None:
    """What a pass would do: write rows, accept some guesses, deliver, end."""
    for work in plan.works:
        request, key = work.request, key_of(work.request)
        scheduler.ledger.draft(key, work.num_rows + work.budget.nodes)
        accepted = rng.randint(0, min(work.budget.depth, work.budget.nodes)) if work.draws else 0
        known = work.start + work.num_rows + accepted
        fresh = [rng.randrange(3) for _ in range(accepted + 1)] if work.draws else []
        scheduler.ledger.commit(key, [*request.tokens(0, request.num_tokens), *fresh], known)
        for token in fresh:
            request.output.append(token)
            if len(request.output) == request.limit or rng.random() < 0.02:
                scheduler.finish(request, FinishReason.STOP)
                break


def check_plan(scheduler: Scheduler, plan: Plan) -> None:
    written: list[int] = []
    rows = 0
    for work in plan.works:
        key = key_of(work.request)
        span = scheduler.ledger[key]
        assert work.start == span.committed
        assert 0 < work.num_rows <= work.request.num_tokens - work.start
        assert work.draws == (work.start + work.num_rows == work.request.num_tokens)
        assert len(work.node_slots) == work.budget.nodes
        assert len(work.scratch) == scheduler.needs.num_scratch(work.budget.depth, work.budget.width)
        written += scheduler.ledger.slots(key, work.start, work.start + work.num_rows)
        written += [*work.node_slots, *work.scratch]
        rows += work.num_rows + work.budget.nodes
        assert len(work.request.output) + work.budget.depth < work.request.limit or not work.budget.depth
    assert rows <= scheduler.max_rows
    assert len(set(written)) == len(written), "a slot is written twice in one pass"
    assert all(slot >= BLOCK_SIZE for slot in written), "the trash block is written"


@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_thousand_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make(blocks=rng.randint(28, 60))
    finished = preempted = number = 0
    for step in range(25_000):
        while len(scheduler.waiting) < 5 and rng.random() < 0.3:
            client, priority = rng.choice("aaab"), rng.choice((0, 0, 0, 1))
            scheduler.add(ask(number, rng.randint(1, 60), rng.randint(1, 40), client, priority))
            number += 1
        if scheduler.running and rng.random() < 0.01:
            scheduler.finish(rng.choice(scheduler.running), FinishReason.ABORT)
        budgets = {
            request.id: Budget(depth, width, depth * width)
            for request in scheduler.decoding()
            if (depth := rng.randint(0, 5)) and (width := rng.randint(1, 3))
        }
        before, ran, lost = len(scheduler.running), set(scheduler.running), scheduler.num_preemptions
        plan = scheduler.plan(budgets)
        check_plan(scheduler, plan)
        assert scheduler.num_preemptions > lost or not scheduler.admits, "a seat is left empty"
        assert set(plan.preempted) <= ran
        assert set(scheduler.running) == ran - set(plan.preempted) | set(plan.admitted)
        assert plan.works or not before, "requests run but nothing is planned"
        preempted += len(plan.preempted)
        apply(scheduler, plan, rng)
        finished += before - len(scheduler.running) > 0
        if step % 50 == 0:
            scheduler.ledger.check()
    while not scheduler.is_idle:
        apply(scheduler, scheduler.plan({}), rng)
    scheduler.ledger.check()
    assert scheduler.ledger.pool.num_held == 0
    assert preempted > 100
    assert finished > 100


def test_decoding_goes_before_prompts_and_prompts_come_in_chunks() -> None:
    scheduler = make(max_rows=8)
    rng = random.Random(0)
    scheduler.add(ask(0, 3))
    apply(scheduler, scheduler.plan({}), rng)
    scheduler.add(ask(1, 30))
    plan = scheduler.plan({0: Budget(2, 1, 2)})
    assert [(work.request.id, work.num_rows, work.budget.nodes) for work in plan.works] == [(0, 1, 2), (1, 5, 0)]
    assert [work.draws for work in plan.works] == [True, False]


def test_guesses_leave_everyone_a_row() -> None:
    """However much the first ones may guess, nobody waits until they are over."""
    scheduler, rng = make(blocks=200, max_rows=8), random.Random(0)
    for number in range(5):
        scheduler.add(ask(number, 1, limit=50))
    apply(scheduler, scheduler.plan({}), rng)
    scheduler.add(ask(5, 30))
    plan = scheduler.plan({number: Budget(6, 1, 6) for number in range(5)})
    assert [(work.num_rows, work.budget.nodes) for work in plan.works] == [
        (1, 2),
        (1, 0),
        (1, 0),
        (1, 0),
        (1, 0),
        (1, 0),
    ]


def test_guesses_shrink_before_anyone_is_preempted() -> None:
    scheduler = make(blocks=4, needs=Needs())
    rng = random.Random(0)
    scheduler.add(ask(0, 10, limit=50))
    apply(scheduler, scheduler.plan({}), rng)
    plan = scheduler.plan({0: Budget(8, 1, 8)})
    assert plan.works[0].budget == Budget()
    assert plan.preempted == ()


def test_no_guess_past_the_limit() -> None:
    scheduler = make()
    rng = random.Random(0)
    request = ask(0, 3, limit=3)
    scheduler.add(request)
    apply(scheduler, scheduler.plan({}), rng)
    assert scheduler.plan({0: Budget(5, 1, 5)}).works[0].budget.depth == 1


def test_the_newest_is_preempted_and_goes_to_the_head_of_the_queue() -> None:
    scheduler = make(blocks=8)
    first, second = ask(0, 10, limit=60), ask(1, 10, limit=60)
    scheduler.add(first)
    scheduler.add(second)
    rng = random.Random(1)
    for step in range(40):
        plan = scheduler.plan({})
        if step and second.phase is Phase.WAITING:
            break
        for work in plan.works:
            scheduler.ledger.draft(key_of(work.request), work.num_rows)
            known = [*work.request.tokens(0, work.request.num_tokens)]
            scheduler.ledger.commit(key_of(work.request), known, work.start + work.num_rows)
            work.request.output.append(rng.randrange(3))
    assert first.phase is Phase.RUNNING
    assert next(iter(scheduler.waiting)) is second


def test_a_request_that_cannot_fit_alone_says_so() -> None:
    scheduler = make(blocks=3)
    scheduler.add(ask(0, 30))
    with pytest.raises(CapacityError, match="num_slots"):
        scheduler.plan({})
