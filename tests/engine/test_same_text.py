"""Any drafter, depth, width, batch, temperature, or none: the same text (faults 1, 13 to 16, 26 to 30)."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import NumericsError
from outrider.registry import CASCADES, DRAFTERS
from outrider.request import FinishReason, Phase, SamplingParams
from tests import toy

ALL = [*DRAFTERS, *CASCADES, "suffix+early_exit", f"small_model{toy.OTHER_WORDS}"]


def plain_text(prompt: list[int], params: SamplingParams, ends: list[int]) -> list[int]:
    """Token by token from the law itself: no engine, no slots, no tree."""
    tokens, output = list(prompt), []
    while len(output) < (params.max_tokens or 1):
        scores = toy.law(tokens).double()
        if params.temperature:
            scores = scores / params.temperature + toy.noise(params.seed, 0, len(output))
        token = int(scores.argmax())
        tokens.append(token)
        output.append(token)
        if token in ends:
            break
    return output


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(toy.VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(count)]


@pytest.mark.parametrize("drafter", ["none", *ALL])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_every_drafter_and_depth_gives_the_plain_text(drafter: str, temperature: float, width: int) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=7)
    texts = prompts(4, seed=3)
    expected = [plain_text(prompt, params, [4]) for prompt in texts]
    for depth in (1, 3, 8):
        engine = toy.make_engine(drafter, depth=depth, width=width)
        requests = [toy.make_request(i, prompt, params, [4]) for i, prompt in enumerate(texts)]
        assert toy.run(engine, requests) == expected
        if drafter != "none":
            assert sum(request.tally.drafted for request in requests) > 0
        for request in requests:
            tally = request.tally
            assert tally.cycles == 0 or tally.tau == pytest.approx((len(request.output) - 1) / tally.cycles)
            assert sum(tally.accepted_by_position) == tally.accepted


@pytest.mark.parametrize("drafter", ["small_model", "early_exit"])
def test_guesses_are_right_more_often_than_chance(drafter: str) -> None:
    """A tree that was fed from wrong keys would still give the right text, but never be accepted."""
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=11)
    engine = toy.make_engine(drafter, depth=4)
    requests = [toy.make_request(i, prompt, params) for i, prompt in enumerate(prompts(4, seed=5))]
    toy.run(engine, requests)
    drafted = sum(request.tally.drafted for request in requests)
    accepted = sum(request.tally.accepted for request in requests)
    # The small model is the target itself here: under shared noise all its guesses are right.
    assert accepted / drafted > (0.9 if drafter == "small_model" else 0.1)


@pytest.mark.parametrize("drafter", ALL)
def test_sixty_four_requests_with_unequal_guesses_each_equal_solo(drafter: str) -> None:
    """Fault 26."""
    engine = toy.make_engine(drafter, depth=6, width=2, blocks=1000, max_requests=64, max_rows=300)
    wanted = [SamplingParams(temperature=i % 2, max_tokens=5 + i % 13, seed=i, depth=i % 7) for i in range(64)]
    requests = [toy.make_request(i, p, wanted[i], [4]) for i, p in enumerate(prompts(64, seed=1))]
    assert toy.run(engine, requests) == [plain_text(list(r.prompt), r.params, [4]) for r in requests]
    assert len({request.tally.drafted for request in requests}) > 3


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    drafter=st.sampled_from(["none", *ALL]),
    depth=st.integers(1, 5),
    width=st.integers(1, 3),
    blocks=st.integers(22, 40),
    block_size=st.sampled_from([1, 2, 4]),
    max_rows=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.7]),
)
def test_small_memory_preempts_and_changes_nothing(
    seed: int, drafter: str, depth: int, width: int, blocks: int, block_size: int, max_rows: int, temperature: float
) -> None:
    """Random arrivals and aborts under memory so small that requests lose their slots and start again."""
    rng = random.Random(seed)
    blocks *= 4 // block_size
    params = SamplingParams(temperature=temperature, max_tokens=20, seed=seed)
    engine = toy.make_engine(
        drafter, depth=depth, width=width, blocks=blocks, block_size=block_size, max_rows=max_rows, adaptive=True
    )
    arrivals = [toy.make_request(i, prompt, params, [4]) for i, prompt in enumerate(prompts(7, seed))]
    waiting = list(arrivals)
    aborted: set[int] = set()
    while waiting or not engine.scheduler.is_idle:
        while waiting and rng.random() < 0.5:
            engine.add(waiting.pop())
        if engine.scheduler.running and rng.random() < 0.04:
            victim = rng.choice(engine.scheduler.running)
            engine.abort(victim)
            aborted.add(victim.id)
        if not engine.scheduler.is_idle:
            engine.step()
        engine.ledger.check()
    assert engine.ledger.pool.num_held == 0
    for request in arrivals:
        expected = plain_text(list(request.prompt), params, [4])
        if request.id in aborted:
            assert request.output == expected[: len(request.output)]
        else:
            assert request.output == expected


def test_preemption_happens_and_replays_the_same_text() -> None:
    params = SamplingParams(max_tokens=40)
    engine = toy.make_engine("small_model", depth=3, blocks=30, block_size=4)
    lost = []
    plan = engine.scheduler.plan
    engine.scheduler.plan = lambda budgets: (lambda p: (lost.extend(p.preempted), p)[1])(plan(budgets))  # type: ignore[method-assign]
    requests = [toy.make_request(i, prompt, params) for i, prompt in enumerate(prompts(4, seed=9))]
    outputs = toy.run(engine, requests)
    assert lost, "the test is meant to run out of slots"
    assert outputs == [plain_text(list(r.prompt), params, []) for r in requests]


@pytest.mark.parametrize("drafter", ["none", "ngram", "small_model"])
def test_a_cached_prefix_changes_no_token(drafter: str) -> None:
    params = SamplingParams(max_tokens=16)
    engine = toy.make_engine(drafter)
    prompt = prompts(1, seed=2)[0] * 3
    cold, warm = (toy.make_request(i, prompt, params) for i in range(2))
    assert toy.run(engine, [cold]) == toy.run(engine, [warm])
    assert cold.num_cached == 0
    assert warm.num_cached == (len(prompt) - 1) // 4 * 4


def test_a_next_turn_finds_the_completion_cached_too() -> None:
    params = SamplingParams(max_tokens=16)
    engine = toy.make_engine("early_exit")
    prompt = prompts(1, seed=4)[0]
    first = toy.make_request(0, prompt, params)
    toy.run(engine, [first])
    turn = [*prompt, *first.output, 3, 1]
    second = toy.make_request(1, turn, params)
    assert toy.run(engine, [second]) == [plain_text(turn, params, [])]
    assert second.num_cached >= (len(prompt) + 15) // 4 * 4


def test_a_request_with_nan_fails_alone() -> None:
    params = SamplingParams(max_tokens=12)
    engine = toy.make_engine("ngram", target=toy.ToyTarget(fail_on=22))
    good, bad = toy.make_request(0, [1, 2, 3], params), toy.make_request(1, [1, 22, 3], params)
    toy.run(engine, [good, bad])
    assert isinstance(bad.error, NumericsError)
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.output == []
    assert good.output == plain_text([1, 2, 3], params, [])[: len(good.output)]


def test_speculation_off_for_one_request_only() -> None:
    engine = toy.make_engine("small_model")
    plain = toy.make_request(0, [1, 2, 3], SamplingParams(max_tokens=12, speculation=False))
    guessed = toy.make_request(1, [1, 2, 3], SamplingParams(max_tokens=12))
    assert toy.run(engine, [plain])[0] == toy.run(engine, [guessed])[0]
    assert plain.tally.drafted == 0
    assert guessed.tally.drafted > 0


@pytest.mark.parametrize("drafter", ALL)
@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_rejection_rule_through_the_engine_follows_the_law(drafter: str, width: int) -> None:
    """Chi-square of the first two tokens against the toy law; other text, same distribution (faults 5 and 10).

    Drafters with weights of their own know four tokens of five.
    """
    from collections import Counter

    from scipy.stats import chisquare

    prompt = [1, 2, 3, 1, 2]
    engine = toy.make_engine(drafter, depth=2, width=width, acceptance="rejection", max_requests=64, blocks=400)
    requests = [toy.make_request(i, prompt, SamplingParams(temperature=1.0, max_tokens=3, seed=i)) for i in range(2000)]
    toy.run(engine, requests, check=False)
    counts = Counter(tuple(request.output[:2]) for request in requests)
    first = torch.softmax(toy.law(prompt).double(), 0)
    observed, expected = [], []
    rest_o = rest_e = 0.0
    for a in range(toy.VOCAB):
        second = torch.softmax(toy.law([*prompt, a]).double(), 0)
        for b in range(toy.VOCAB):
            chance = float(first[a] * second[b]) * len(requests)
            if chance >= 5:
                observed.append(counts[a, b])
                expected.append(chance)
            else:
                rest_o += counts[a, b]
                rest_e += chance
    assert chisquare([*observed, rest_o], [*expected, rest_e]).pvalue > 1e-3


def test_an_end_inside_an_accepted_run_leaves_as_much_cached_as_plain_decoding() -> None:
    """Faults 14 and 33: the next turn's cached count, wherever the last turn was cut."""
    for seed in range(40):
        prompt, counts = prompts(1, seed)[0], []
        for drafter in ("none", "small_model"):
            engine = toy.make_engine(drafter, depth=5)
            first = toy.make_request(0, prompt, SamplingParams(max_tokens=30), ends=[4, 7, 9])
            toy.run(engine, [first])
            second = toy.make_request(1, [*prompt, *first.output, 3, 1], SamplingParams(max_tokens=3))
            toy.run(engine, [second])
            counts.append(second.num_cached)
        assert counts[0] == counts[1], seed


@pytest.mark.parametrize("drafter", ["none", "small_model"])
def test_preemption_changes_no_count_and_no_prompt_logprob(drafter: str) -> None:
    params = SamplingParams(max_tokens=40, prompt_logprobs=1, logprobs=1)
    outcomes = []
    for blocks in (400, 30):
        engine = toy.make_engine(drafter, depth=3, blocks=blocks, block_size=4, max_rows=16)
        requests = [toy.make_request(i, prompt, params) for i, prompt in enumerate(prompts(4, seed=9))]
        toy.run(engine, requests)
        outcomes.append([(r.output, r.logprobs, r.prompt_logprobs, r.num_cached) for r in requests])
    assert outcomes[0] == outcomes[1]


def test_a_request_preempted_within_its_prompt_does_not_count_its_own_keys_as_cached() -> None:
    engine = toy.make_engine(blocks=20, block_size=2, max_rows=6)
    params = SamplingParams(max_tokens=12)
    requests = [toy.make_request(i, prompt, params) for i, prompt in enumerate([[1, 2], [5] * 20])]
    for request in requests:
        engine.add(request)
    for _ in range(2):
        engine.step()
    assert requests[1].phase is Phase.RUNNING
    assert not requests[1].output
    engine.scheduler._preempt(requests[1])
    toy.run(engine, [])
    assert [request.num_cached for request in requests] == [0, 0]


def test_nan_where_prompt_logprobs_were_asked_fails_that_request_alone() -> None:
    engine = toy.make_engine("ngram", target=toy.ToyTarget(fail_on=22))
    good = toy.make_request(0, [1, 2, 3], SamplingParams(max_tokens=12))
    bad = toy.make_request(1, [1, 22, 3], SamplingParams(max_tokens=12, prompt_logprobs=1))
    toy.run(engine, [good, bad])
    assert isinstance(bad.error, NumericsError)
    assert good.output == plain_text([1, 2, 3], SamplingParams(max_tokens=12), [])[: len(good.output)]
