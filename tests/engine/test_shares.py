"""Equal shares: who waits, who gives way, who gets rows; and the first token under a flood, in simulated time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine import shares
from outrider.engine.scheduler import Scheduler, key_of
from outrider.engine.shares import Line, rations, yielding
from outrider.request import FinishReason, Request, SamplingParams
from tests.engine.test_scheduler import check_plan, make

clients = st.sampled_from("abcd")
amounts = st.dictionaries(clients, st.integers(1, 80), min_size=1)


def ask(number: int, client: str, prompt: int = 4, limit: int = 20, priority: int = 0) -> Request:
    tokens = tuple((number * 7 + place) % 5 for place in range(prompt))
    return Request(number, tokens, SamplingParams(), 0, limit=limit, client=client, priority=priority)


def line_of(*requests: Request) -> Line:
    line = Line()
    for request in requests:
        line.add(request)
    return line


def order(line: Line) -> list[int]:
    found = []
    while (request := line.first([])) is not None:
        line.take(request)
        found.append(request.id)
    return found


def test_one_client_is_served_as_it_came() -> None:
    assert order(line_of(*(ask(number, "a") for number in range(5)))) == [0, 1, 2, 3, 4]


def test_clients_take_turns_whoever_came_with_more() -> None:
    line = line_of(*(ask(number, "a") for number in range(4)), ask(4, "b"), ask(5, "b"), ask(6, "c"))
    assert order(line) == [0, 4, 6, 1, 5, 2, 3]


def test_the_client_that_runs_fewest_is_next() -> None:
    line = line_of(ask(0, "a"), ask(1, "b"))
    assert line.first([ask(2, "a"), ask(3, "b"), ask(4, "a")]).client == "b"


def test_a_larger_number_yields_to_all_smaller_ones() -> None:
    line = line_of(ask(0, "a", priority=1), ask(1, "b", priority=2), ask(2, "a"), ask(3, "b"))
    assert order(line) == [2, 3, 0, 1]


def test_whoever_was_preempted_goes_before_its_clients_others() -> None:
    line = line_of(ask(0, "a"), ask(1, "a"))
    line.put_back(ask(2, "a"))
    assert order(line) == [2, 0, 1]
    assert (len(line), list(line)) == (0, [])


def test_turns_of_clients_without_number_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(shares, "MOST_TURNS", 3)
    line = line_of(*(ask(number, str(number)) for number in range(10)))
    assert order(line) == list(range(10))
    assert len(line._turns) == 3


def test_who_gives_way() -> None:
    flood = [ask(number, "a") for number in range(3)]
    assert yielding(ask(9, "b"), flood) is flood[-1]
    assert yielding(ask(9, "a"), flood) is None
    assert yielding(ask(9, "b"), [*flood[:2], ask(5, "b")]) is None, "it would only change who is the one with two"
    later = ask(6, "c", priority=1)
    assert yielding(ask(9, "a"), [later, *flood]) is later
    assert yielding(ask(9, "b", priority=1), flood) is None


@given(st.integers(0, 200), amounts, st.dictionaries(clients, st.integers(0, 40)))
def test_rations_are_max_min_fair(rows: int, wanted: dict[str, int], had: dict[str, int]) -> None:
    given_out = rations(rows, wanted, had)
    assert set(given_out) == set(wanted)
    assert sum(given_out.values()) == min(rows, sum(wanted.values()))
    assert all(0 <= given_out[client] <= wanted[client] for client in wanted)
    total = {client: had.get(client, 0) + given_out[client] for client in wanted}
    for one in wanted:
        for other in wanted:
            if given_out[one] < wanted[one] and given_out[other]:
                assert total[other] <= total[one] + 1, "one went short while another got more"


@dataclass
class Told:
    """What a simulation saw of one request, in its seconds."""

    arrived: float
    is_polite: bool
    entitled: float = 0.0
    """Rows that its client's share of the passes since then came to."""
    fair: float | None = None
    """When that sufficed for its prompt."""
    first: float | None = None


@dataclass
class World:
    """Time passes by the rows of the passes: a second, and a hundredth for each row."""

    scheduler: Scheduler
    rng: random.Random
    now: float = 0.0
    told: dict[int, Told] = field(default_factory=dict)
    open: dict[int, Request] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        self.told[request.id] = Told(self.now, request.client != "flood")
        self.open[request.id] = request
        self.scheduler.add(request)

    def step(self) -> None:
        scheduler = self.scheduler
        active = len({request.client for request in self.open.values()})
        plan = scheduler.plan({})
        check_plan(scheduler, plan)
        rows = sum(work.num_rows for work in plan.works)
        self.now += 1 + rows / 100
        for number, request in self.open.items():
            told = self.told[number]
            told.entitled += scheduler.max_rows / active
            if told.fair is None and told.entitled >= len(request.prompt):
                told.fair = self.now
        for work in plan.works:
            request, key = work.request, key_of(work.request)
            scheduler.ledger.draft(key, work.num_rows)
            scheduler.ledger.commit(key, request.tokens(0, request.num_tokens), work.start + work.num_rows)
            if work.draws:
                self.told[request.id].first = self.told[request.id].first or self.now
                request.output.append(self.rng.randrange(3))
                if len(request.output) == request.limit:
                    scheduler.finish(request, FinishReason.LENGTH)
                    del self.open[request.id]


@pytest.mark.parametrize("num_polite", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_first_token_under_a_flood_comes_within_its_fair_share(num_polite: int, seed: int) -> None:
    """Some ask one thing after the other while another client asks sixty at once, again and again."""
    rng = random.Random(seed)
    world, number = World(make(blocks=2000, max_requests=8, max_rows=64), rng), 0
    # Prompts hold nothing in common: a prefix hit would read less than its share.
    while world.now < 1500:
        held = Counter(request.client for request in world.open.values())
        if held["flood"] < 30:
            for _ in range(60):
                world.add(ask(number, "flood", rng.randint(20, 70), rng.randint(5, 25)))
                number += 1
        for polite in range(num_polite):
            if not held[f"polite {polite}"] and rng.random() < 0.1:
                world.add(ask(number, f"polite {polite}", rng.randint(5, 60), rng.randint(1, 20)))
                number += 1
        world.step()
    ratios = [
        (told.first - told.arrived) / (told.fair - told.arrived)
        for told in world.told.values()
        if told.is_polite and told.first is not None and told.fair is not None
    ]
    assert len(ratios) > 40
    assert max(ratios) <= 1.2, sorted(ratios)[-5:]
