"""Heads fed from taps while nothing is guessed: cycles stay in the air, and the next guess is as ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from outrider.engine.outlines import MOST_UNREAD
from outrider.engine.step import Engine
from outrider.request import Request, SamplingParams
from outrider.tree import Budget
from tests import toy
from tests.engine.test_pipeline import flown
from tests.engine.test_same_text import plain_text, prompts

FED = ["eagle3", "medusa", "block"]
DEPTH = 3


def by_length(engine: Engine, depth_at: Callable[[int], int]) -> None:
    """Control guesses as deep as the number of tokens that a request has said by now would have it."""

    def budgets(requests: Sequence[Request], *_: object) -> dict[int, Budget]:
        depths = {request.id: depth_at(len(request.output)) for request in requests}
        return {number: Budget(depth, 1, depth) for number, depth in depths.items() if depth}

    engine.control.adaptive = False
    engine.control.budget = engine.control.outlined = budgets


def guesses(engine: Engine) -> list[list[int]]:
    """The chains that are proposed from now on, on the host or on the device."""
    found: list[list[int]] = []
    drafter = engine.drafter
    assert drafter is not None
    propose, draft = drafter.propose, drafter.draft

    def proposed(asks):
        trees = propose(asks)
        found.extend(list(tree.tokens) for tree in trees)
        return trees

    def drafted(crew, outline):
        tree = draft(crew, outline)
        found.extend([token for token in row if token >= 0] for row in tree.tokens.tolist())
        return tree

    drafter.propose, drafter.draft = proposed, drafted
    return found


def are_alike(lockstep: list[list[int]], flying: list[list[int]]) -> None:
    """On the device trees are cut to what may still be said after they were drafted, the last perhaps to nothing."""
    assert len(lockstep) <= len(flying) <= len(lockstep) + 1
    assert lockstep == [chain[: len(other)] for chain, other in zip(flying, lockstep, strict=False)] != []


@pytest.mark.parametrize("drafter", FED)
@pytest.mark.parametrize("every", [2, 3, 5, MOST_UNREAD + 1, 2 * MOST_UNREAD + 3])
def test_the_guess_after_any_number_of_plain_cycles_is_that_of_lockstep(drafter: str, every: int) -> None:
    params = SamplingParams(max_tokens=60, seed=2, temperature=1.0)
    (prompt,) = prompts(1, seed=5)
    said, told = [], []
    for in_flight in (0, 1):
        engine = toy.make_engine(drafter, depth=DEPTH, in_flight=in_flight, blocks=200)
        by_length(engine, lambda length, every=every: DEPTH if length % every == 0 else 0)
        cycles = flown(engine) if in_flight else [0]
        told.append(guesses(engine))
        said.append(toy.run(engine, [toy.make_request(0, prompt, params)]))
        assert len(cycles) > 20 * in_flight, "hardly anything flew"
    assert said[0] == said[1] == [plain_text(prompt, params, [])]
    assert len(told[0]) >= 60 // (every + DEPTH)
    are_alike(*told)


@pytest.mark.parametrize("drafter", FED)
def test_who_never_guesses_flies(drafter: str) -> None:
    params = SamplingParams(max_tokens=40, seed=2)
    texts = prompts(3, seed=6)
    engine = toy.make_engine(drafter, depth=DEPTH, in_flight=2, blocks=300)
    by_length(engine, lambda length: 0)
    cycles = flown(engine)
    requests = [toy.make_request(i, prompt, params) for i, prompt in enumerate(texts)]
    assert toy.run(engine, requests) == [plain_text(prompt, params, []) for prompt in texts]
    assert len(cycles) >= 38
    assert max(cycles) == 1


@pytest.mark.parametrize("drafter", FED)
def test_who_lands_with_tokens_unread_guesses_as_if_it_had_never_flown(drafter: str) -> None:
    """A second request comes while the first one's head lags; what it has not read goes with it."""
    params = SamplingParams(max_tokens=60, seed=3)
    first, second = prompts(2, seed=8)
    told = []
    for in_flight in (0, 1):
        engine = toy.make_engine(drafter, depth=DEPTH, in_flight=in_flight, blocks=300)
        by_length(engine, lambda length: DEPTH if length >= 30 else 0)
        found = guesses(engine)
        requests = [toy.make_request(0, first, params)]
        engine.add(requests[0])
        while len(requests[0].output) < 15:
            engine.step()
        requests.append(toy.make_request(1, second, SamplingParams(max_tokens=3, seed=3)))
        toy.run(engine, requests[1:])
        toy.run(engine, [])
        assert requests[0].output == plain_text(first, params, [])
        told.append(found)
    are_alike(*told)
