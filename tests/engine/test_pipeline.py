"""Cycles in the air: the same texts, guesses, books and ends as in lockstep, whatever lands them (issue 4, item 3)."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.step import Engine
from outrider.registry import CASCADES, DRAFTERS
from outrider.request import FinishReason, Request, SamplingParams
from tests import toy
from tests.engine.test_same_text import plain_text, prompts

ON_DEVICE = ["small_model", "early_exit", "eagle3", "medusa", "block"]


def flown(engine: Engine) -> list[int]:
    """Counts the cycles that are read from now on: one entry each, how many stayed in the air."""
    counts: list[int] = []
    assert engine.pipeline is not None
    collect = engine.pipeline.collect

    def counted():
        found = collect()
        counts.append(len(engine.pipeline._air))
        return found

    engine.pipeline.collect = counted
    return counts


def tallies(requests: list[Request]) -> list[tuple[int, ...]]:
    return [(r.tally.drafted, r.tally.accepted, r.tally.cycles, *r.tally.accepted_by_position) for r in requests]


def test_every_drafter_that_can_fly_is_tried_here() -> None:
    engines = {name: toy.make_engine(name, in_flight=2) for name in [*DRAFTERS, *CASCADES, "early_exit+medusa"]}
    assert [name for name, engine in engines.items() if engine.pipeline] == [n for n in DRAFTERS if n in ON_DEVICE]


@pytest.mark.parametrize("drafter", ["none", *ON_DEVICE])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_the_plain_text_with_any_number_of_cycles_in_the_air(drafter: str, temperature: float, width: int) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=7)
    texts = prompts(4, seed=3)
    expected = [plain_text(prompt, params, [4]) for prompt in texts]
    for depth, in_flight in ((1, 2), (3, 1), (4, 3)):
        engine = toy.make_engine(drafter, depth=depth, width=width, in_flight=in_flight, blocks=200)
        cycles = flown(engine)
        requests = [toy.make_request(i, prompt, params, [4]) for i, prompt in enumerate(texts)]
        assert toy.run(engine, requests) == expected
        assert max(cycles) == in_flight - 1, "nothing overlapped"
        for request in requests:
            tally = request.tally
            assert tally.cycles == 0 or tally.tau == pytest.approx((len(request.output) - 1) / tally.cycles)


@pytest.mark.parametrize("drafter", ON_DEVICE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chains_are_those_of_lockstep_whenever_requests_come(drafter: str, temperature: float) -> None:
    """A drafter fed with a wrong token, tap or key would still give the right text, but guess something else."""
    found = []
    for in_flight in (0, 2):
        rng = random.Random(8)
        engine = toy.make_engine(drafter, depth=4, in_flight=in_flight, blocks=300)
        params = [SamplingParams(temperature=temperature, max_tokens=10 + 3 * i, seed=i, depth=i % 5) for i in range(7)]
        requests = [toy.make_request(i, p, params[i], [4]) for i, p in enumerate(prompts(7, seed=6))]
        waiting = list(requests)
        while waiting or not engine.scheduler.is_idle:
            if waiting and (rng.random() < 0.2 or engine.scheduler.is_idle):
                engine.add(waiting.pop())
            engine.step()
            engine.ledger.check()
        found.append((tallies(requests), [request.output for request in requests]))
    assert found[0] == found[1]


@pytest.mark.parametrize("drafter", ["none", "small_model", "eagle3"])
def test_what_is_cached_after_an_end_is_what_lockstep_leaves(drafter: str) -> None:
    """Faults 14 and 33, where the next cycle was on the device before the end was known."""
    for seed in range(12):
        prompt, counts = prompts(1, seed)[0], []
        for in_flight in (0, 2):
            engine = toy.make_engine(drafter, depth=5, in_flight=in_flight)
            first = toy.make_request(0, prompt, SamplingParams(max_tokens=30), ends=[4, 7, 9])
            toy.run(engine, [first])
            second = toy.make_request(1, [*prompt, *first.output, 3, 1], SamplingParams(max_tokens=6))
            counts.append((toy.run(engine, [second]), second.num_cached))
        assert counts[0] == counts[1], seed


def in_the_air(engine: Engine, requests: list[Request], num_steps: int = 4) -> None:
    """Bring the requests so far that a cycle is in the air after every step."""
    for request in requests:
        engine.add(request)
    for _ in range(num_steps):
        engine.step()
    assert all(engine.pipeline.carries(request) for request in requests)


def test_an_abort_in_the_air_frees_slots_with_the_last_cycle_and_touches_nobody() -> None:
    engine = toy.make_engine("small_model", depth=3, in_flight=2, blocks=200)
    params = SamplingParams(max_tokens=30)
    kept, gone = (toy.make_request(i, prompt, params) for i, prompt in enumerate(prompts(2, seed=4)))
    in_the_air(engine, [kept, gone])
    said, held = list(gone.output), engine.ledger.pool.num_held
    engine.abort(gone)
    assert gone.finish_reason is FinishReason.ABORT
    assert engine.ledger.pool.num_held == held, "a cycle that still writes there is under way"
    assert not engine.scheduler.is_idle
    emissions, _ = engine.step()
    assert [emission.request for emission in emissions] == [kept]
    assert not engine.scheduler.departing
    toy.run(engine, [])
    assert gone.output == said
    assert kept.output == plain_text(list(kept.prompt), params, [])


@pytest.mark.parametrize("by_abort", [False, True])
def test_nothing_is_left_in_the_air_when_the_last_request_is_over(by_abort: bool) -> None:
    engine = toy.make_engine("small_model", depth=3, in_flight=3, blocks=200)
    requests = [toy.make_request(i, prompt, SamplingParams(max_tokens=30)) for i, prompt in enumerate(prompts(2, 4))]
    in_the_air(engine, requests)
    while not all(request.is_finished for request in requests):
        if by_abort:
            engine.abort(engine.scheduler.running[0])
        else:
            engine.step()
    assert engine.scheduler.is_idle
    assert engine.ledger.pool.num_held == 0
    assert not engine.pipeline._air


def test_a_request_that_comes_lands_the_others_and_all_fly_again() -> None:
    engine = toy.make_engine("eagle3", depth=3, in_flight=2, blocks=200)
    cycles = flown(engine)
    params = SamplingParams(max_tokens=40)
    first, second = (toy.make_request(i, prompt, params) for i, prompt in enumerate(prompts(2, seed=4)))
    in_the_air(engine, [first])
    engine.add(second)
    while not second.output:
        engine.step()
    before = len(cycles)
    toy.run(engine, [])
    assert len(cycles) > before + 3
    assert [r.output for r in (first, second)] == [plain_text(list(r.prompt), params, []) for r in (first, second)]


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": 1}, {"top_p": 0.5, "temperature": 1.0}, {"presence_penalty": 1.0}, {"logit_bias": {3: 2.0}}],
)
def test_who_needs_tokens_on_the_host_keeps_all_in_lockstep(fields: dict) -> None:
    engine = toy.make_engine("small_model", depth=3, in_flight=2, blocks=200)
    cycles = flown(engine)
    wanting = toy.make_request(0, [1, 2, 3], SamplingParams(max_tokens=12, seed=1, **fields))
    other = toy.make_request(1, [3, 2, 1], SamplingParams(max_tokens=30))
    engine.add(wanting)
    engine.add(other)
    while not wanting.is_finished:
        engine.step()
        assert not cycles
    toy.run(engine, [])
    assert cycles
    assert other.output == plain_text([3, 2, 1], other.params, [])
    assert wanting.params.logprobs is None or len(wanting.logprobs) == 12


def test_tokens_that_may_not_end_yet_are_counted_on_the_host() -> None:
    """`min_tokens` warps the first positions only: from there on the request flies."""
    params = SamplingParams(max_tokens=20, min_tokens=6)
    outputs = []
    for in_flight in (0, 2):
        engine = toy.make_engine("small_model", depth=2, in_flight=in_flight)
        cycles = flown(engine) if in_flight else [0]
        outputs.append(toy.run(engine, [toy.make_request(0, [1, 2, 3], params, ends=range(0, toy.VOCAB, 2))]))
        assert cycles
    assert outputs[0] == outputs[1]


def test_a_request_without_a_law_fails_alone_and_as_in_lockstep() -> None:
    found = []
    for in_flight in (0, 2):
        engine = toy.make_engine("small_model", depth=3, target=toy.ToyTarget(fail_on=22), in_flight=in_flight)
        params = SamplingParams(max_tokens=60, temperature=1.0, seed=5)
        requests = [toy.make_request(i, prompt, params) for i, prompt in enumerate(prompts(5, seed=12))]
        toy.run(engine, requests)
        found.append([(r.output, r.finish_reason, str(r.error)) for r in requests])
    assert any(reason is FinishReason.ERROR and output for output, reason, _ in found[0]), "nobody met the token"
    assert found[0] == found[1]


def test_a_change_of_depth_holds_from_the_next_launch() -> None:
    engine = toy.make_engine("small_model", depth=2, in_flight=2, blocks=200)
    params = SamplingParams(max_tokens=100)
    request = toy.make_request(0, [1, 2, 3], params)
    in_the_air(engine, [request], num_steps=6)
    depths = []
    for depth in (6, 6, 6, 1, 1, 1, 4, 4, 4):
        with engine.always_guessing(depth):
            _, record = engine.step()
        depths.append(record.cycles[0].depth)
    assert depths == [2, 6, 6, 6, 1, 1, 1, 4, 4]
    toy.run(engine, [])
    assert request.output == plain_text([1, 2, 3], params, [])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    drafter=st.sampled_from(["none", *ON_DEVICE]),
    depth=st.integers(1, 5),
    width=st.integers(1, 3),
    blocks=st.integers(22, 40),
    in_flight=st.integers(1, 3),
    temperature=st.sampled_from([0.0, 0.7]),
)
def test_where_memory_is_short_requests_land_and_are_preempted(
    seed: int, drafter: str, depth: int, width: int, blocks: int, in_flight: int, temperature: float
) -> None:
    rng = random.Random(seed)
    params = SamplingParams(temperature=temperature, max_tokens=20, seed=seed)
    engine = toy.make_engine(
        drafter, depth=depth, width=width, blocks=blocks, adaptive=rng.random() < 0.5, in_flight=in_flight
    )
    requests = [toy.make_request(i, prompt, params, [4]) for i, prompt in enumerate(prompts(6, seed))]
    assert toy.run(engine, requests) == [plain_text(list(r.prompt), params, [4]) for r in requests]


@pytest.mark.parametrize("verb", ["board", "draft", "follow", "leave"])
def test_a_drafter_that_fails_on_the_device_is_left_out(caplog, verb: str) -> None:
    engine = toy.make_engine("eagle3", depth=3, in_flight=2, blocks=200)
    engine.strict = False
    params = SamplingParams(max_tokens=30)
    first, second = (toy.make_request(i, prompt, params) for i, prompt in enumerate(prompts(2, seed=4)))
    in_the_air(engine, [first])

    def broken(*_):
        raise ValueError("no")

    setattr(engine.drafter, verb, broken)
    engine.add(second)  # lands the first one: it leaves its seat, and both board again
    with caplog.at_level(logging.WARNING, "outrider"):
        toy.run(engine, [])
    assert "texts go on without its guesses" in str(engine.fault)
    assert [r.output for r in (first, second)] == [plain_text(list(r.prompt), params, []) for r in (first, second)]


def test_nodes_that_are_none_are_never_taken() -> None:
    """Whatever a drafter says on the device: ids outside the vocabulary, siblings twice, or nothing at all."""
    engine = toy.make_engine("small_model", depth=3, width=2, in_flight=2, blocks=200)
    generator = torch.Generator().manual_seed(0)
    draft = engine.drafter.draft

    def wild(crew, outline):
        tree = draft(crew, outline)
        noise = torch.randint(0, toy.VOCAB, tree.tokens.shape, generator=generator)
        strange = torch.randint(-9, 2 * toy.VOCAB, tree.tokens.shape, generator=generator)
        noise = torch.where(tree.depths == outline.depth, strange, noise)
        tree.tokens.copy_(torch.where(torch.rand(tree.tokens.shape, generator=generator) < 0.5, noise, tree.tokens))
        return tree

    engine.drafter.draft = wild
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    requests = [toy.make_request(i, prompt, params) for i, prompt in enumerate(prompts(3, seed=2))]
    assert toy.run(engine, requests) == [plain_text(list(r.prompt), params, []) for r in requests]
