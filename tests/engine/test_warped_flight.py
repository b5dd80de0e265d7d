"""Cycles in the air whose laws are truncated and penalised: the texts that lockstep warps row by row."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.request import SamplingParams
from tests import toy
from tests.engine.test_pipeline import ON_DEVICE, flown, in_the_air
from tests.engine.test_same_text import prompts
from tests.warping import WarpingTarget

LAWS = [
    {"top_p": 0.8},
    {"top_k": 3, "temperature": 0.7},
    {"min_p": 0.2, "temperature": 1.5},
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"frequency_penalty": 0.7, "presence_penalty": -0.3},
    {"top_p": 0.9, "top_k": 9, "min_p": 0.01, "repetition_penalty": 0.8, "presence_penalty": 0.4},
    {},
]


def plain(prompt: list[int], params: SamplingParams, ends: list[int]) -> list[int]:
    """One request alone, a token a pass, each law made by operations of PyTorch."""
    return toy.run(toy.make_engine(), [toy.make_request(0, prompt, params, ends)])[0]


def flying(drafter: str, **own):
    return toy.make_engine(drafter, in_flight=2, blocks=300, target=WarpingTarget(), **own)


@pytest.mark.parametrize("drafter", ["none", *ON_DEVICE])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("laws", [LAWS, LAWS[:1], LAWS[3:4], LAWS[:3]], ids=["all", "nucleus", "penalty", "truncated"])
def test_the_plain_text_under_any_law(drafter: str, width: int, laws: list[dict]) -> None:
    texts = prompts(len(laws), seed=3)
    params = [SamplingParams(**{"temperature": 1.0, "max_tokens": 25, "seed": 7, **law}) for law in laws]
    engine = flying(drafter, depth=3, width=width)
    cycles = flown(engine)
    requests = [toy.make_request(i, text, params[i]) for i, text in enumerate(texts)]
    assert toy.run(engine, requests) == [plain(text, params[i], []) for i, text in enumerate(texts)]
    assert max(cycles) == 1, "nothing overlapped"
    if drafter != "none":
        assert sum(request.tally.drafted for request in requests) > 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_counts_follow_whoever_comes_lands_and_takes_off_again(seed: int) -> None:
    """Requests that need the host come and go, so that the others land with what they said, and take off again."""
    rng = random.Random(seed)
    engine = flying("eagle3", depth=rng.randint(1, 4), width=rng.choice([1, 2]))
    own = [rng.choice([*LAWS, {"logit_bias": {3: 2.0}}, {"min_tokens": 6}, {"logprobs": 1}]) for _ in range(7)]
    fields = [{"temperature": 1.0, "max_tokens": rng.randint(6, 40), "seed": i, **law} for i, law in enumerate(own)]
    requests = [
        toy.make_request(i, text, SamplingParams(**fields[i]), [4, 9]) for i, text in enumerate(prompts(7, seed))
    ]
    waiting = list(requests)
    while waiting or not engine.scheduler.is_idle:
        if waiting and (rng.random() < 0.2 or engine.scheduler.is_idle):
            engine.add(waiting.pop())
        engine.step()
    for request in requests:
        assert request.output == plain(list(request.prompt), request.params, [4, 9])


def test_a_law_that_names_tokens_stays_in_lockstep_and_lets_others_fly_when_it_ends() -> None:
    for field in ({"logit_bias": {3: 1.0}}, {"bad_words": ((3,),)}):
        engine = flying("small_model", depth=2)
        cycles = flown(engine)
        params = SamplingParams(temperature=1.0, max_tokens=12, seed=3, **field)
        assert toy.run(engine, [toy.make_request(0, [1, 2], params)]) == [plain([1, 2], params, [])]
        assert not cycles


def test_who_sits_where_a_penalised_one_sat_inherits_nothing() -> None:
    engine = flying("none", max_requests=1)
    params = SamplingParams(temperature=0.0, max_tokens=20, frequency_penalty=2.0)
    for text in prompts(3, seed=5):
        assert toy.run(engine, [toy.make_request(0, text, params)]) == [plain(text, params, [])]


def test_a_change_of_steps_in_the_air_is_followed() -> None:
    """A penalised request joins one that is not: from then on its rows are warped beside the other's."""
    engine = flying("medusa", depth=2)
    first, second = prompts(2, seed=8)
    free, bound = (SamplingParams(temperature=1.0, max_tokens=40, seed=1, **law) for law in ({}, LAWS[5]))
    requests = [toy.make_request(0, first, free), toy.make_request(1, second, bound)]
    in_the_air(engine, requests[:1])
    engine.add(requests[1])
    while not engine.scheduler.is_idle:
        engine.step()
    assert [r.output for r in requests] == [plain(first, free, []), plain(second, bound, [])]
