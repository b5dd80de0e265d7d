"""Random fields, arrivals, aborts and preemptions: what a request gives is what it gives alone, plainly and cold."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.step import Engine
from outrider.engine.text import TextStream
from outrider.registry import DRAFTERS
from outrider.request import FinishReason, LogprobsMode, Request, SamplingParams
from outrider.sampling.automaton import TokenAutomaton
from tests import toy

EOS = 4
PENALTIES = [-2.0, 0.5, 2.0]
token = st.integers(0, toy.VOCAB - 1)
words = st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple)
strings = st.text([chr(97 + i) for i in range(toy.VOCAB)], min_size=1, max_size=3)


@st.composite
def automata(draw: st.DrawFn) -> TokenAutomaton:
    """Up to four states, some of which allow everything, and now and then a token that the model lacks."""
    states = range(draw(st.integers(1, 4)))
    steps = st.dictionaries(st.integers(0, toy.VOCAB), st.sampled_from(states), min_size=1, max_size=5)
    return TokenAutomaton(0, {state: draw(st.none() | steps) for state in states})


FIELDS = {
    "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    "top_k": st.integers(1, toy.VOCAB + 2),
    "top_p": st.sampled_from([0.1, 0.5, 0.9]),
    "min_p": st.sampled_from([0.05, 0.5, 1.0]),
    "repetition_penalty": st.sampled_from([0.5, 2.0]),
    "frequency_penalty": st.sampled_from(PENALTIES),
    "presence_penalty": st.sampled_from(PENALTIES),
    "logit_bias": st.dictionaries(token, st.sampled_from([-100.0, 5.0, -math.inf]), max_size=3),
    "bad_words": words,
    "min_tokens": st.integers(0, 4),
    "stop": st.lists(strings, max_size=3).map(tuple),
    "stop_token_ids": st.lists(token, max_size=2).map(tuple),
    "logprobs": st.integers(0, 3),
    "logprobs_mode": st.sampled_from(LogprobsMode),
    "prompt_logprobs": st.integers(0, 2),
    "speculation": st.just(False),
    "depth": st.integers(0, 3),
    "width": st.integers(1, 2),
    "trace": st.just(True),
    "automaton": automata(),
}
params = st.fixed_dictionaries(
    {"max_tokens": st.integers(4, 24), "seed": st.integers(0, 2**64 - 1)}, optional=FIELDS
).map(lambda chosen: SamplingParams(**chosen))


@dataclass
class Client:
    """One request and all that was delivered of it."""

    request: Request
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    text: str = ""

    def facts(self) -> tuple:
        request = self.request
        return (
            *(request.output, request.finish_reason, request.logprobs, request.prompt_logprobs),
            *(str(request.error), self.stream.text, self.tokens, self.text),
        )


def ask(number: int, prompt: list[int], chosen: SamplingParams) -> Client:
    ends = [EOS, *chosen.stop_token_ids]
    request = toy.make_request(number, prompt, chosen, ends)
    return Client(request, TextStream(toy.ToyTokenizer().decode, chosen.stop, chosen.min_tokens))


def step(engine: Engine, clients: dict[int, Client]) -> None:
    emissions, record = engine.step()
    engine.ledger.check()
    for emission in emissions:
        client = clients[emission.request.id]
        client.tokens += emission.tokens
        client.text += emission.text
    drafter = engine.drafter
    lawful = engine.target.fail_on is None  # a walk ends before a row without a law, however right the guess
    for cycle in record.cycles if lawful else ():
        request = clients[cycle.request_id].request
        if drafter and drafter.name == "small_model" and engine.control.width == 1 and engine.acceptance == "match":
            # It is the target itself: with the keys of the right tokens no guess is wrong, until an end.
            assert cycle.delivered == cycle.drafted + 1 or request.finish_reason is not None, "stale keys"


def alone(prompt: list[int], chosen: SamplingParams, fail_on: int | None) -> Client:
    engine, client = toy.make_engine(blocks=120, target=toy.ToyTarget(fail_on)), ask(0, prompt, chosen)
    engine.add(client.request, client.stream)
    while not engine.scheduler.is_idle:
        step(engine, {0: client})
    return client


def run(engine: Engine, clients: dict[int, Client], rng: random.Random) -> None:
    """Arrivals, aborts and preemptions at random moments, until all is over."""
    waiting = list(clients.values())
    while waiting or not engine.scheduler.is_idle:
        while waiting and rng.random() < 0.5:
            client = waiting.pop()
            engine.add(client.request, client.stream)
        if engine.scheduler.running and rng.random() < 0.05:
            victim = rng.choice(engine.scheduler.running)
            if rng.random() < 0.3:
                engine.abort(victim)
            elif not (engine.pipeline and engine.pipeline.carries(victim)):
                if engine.pipeline:
                    engine.pipeline._land()
                engine.scheduler._preempt(victim)
                if engine.drafter:
                    engine.drafter.end(victim)
        if rng.random() < 0.1 and engine.control.depth:
            engine.control.depth = rng.randint(1, 6)
        if not engine.scheduler.is_idle:
            step(engine, clients)


def check_books(engine: Engine, clients: dict[int, Client]) -> None:
    """Nothing is left behind, and the counters fit each other (fault 37)."""
    assert engine.ledger.pool.num_held == 0
    assert not engine._contexts
    assert not engine._texts
    assert not engine.control._lives._lives
    assert not engine.control.shapes._own
    assert not engine.control.purses._own
    assert not engine.control.acceptance._requests
    if engine.pipeline:
        assert not engine.pipeline._taken
        assert len(engine.pipeline._free) == engine.scheduler.max_requests
    for request in (client.request for client in clients.values()):
        tally = request.tally
        assert 0 <= tally.accepted <= tally.drafted
        assert sum(tally.accepted_by_position) == tally.accepted
        assert tally.cycles + tally.accepted == max(0, len(request.output) - 1)
        assert request.params.logprobs is None or len(request.logprobs) == len(request.output)
        assert tally.drafted == 0 or (request.params.speculation and request.params.depth != 0)


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    wanted=st.lists(params, min_size=2, max_size=6),
    drafter=st.sampled_from(["none", *DRAFTERS]),
    depth=st.integers(1, 6),
    width=st.sampled_from([1, 1, 2, 4]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    roomy=st.integers(1, 4),
    max_rows=st.sampled_from([1, 2, 7, 64]),
    max_requests=st.sampled_from([1, 3, 16]),
    in_flight=st.sampled_from([0, 1, 2, 3]),
    switches=st.tuples(st.booleans(), st.booleans()),
    fail_on=st.none() | st.just(22),
)
def test_company_and_guesses_change_nothing(
    acceptance: str, seed: int, wanted: list[SamplingParams], switches: tuple[bool, bool], fail_on: int | None, **shape
) -> None:
    rng = random.Random(seed)
    blocks = shape.pop("roomy") * (-(-60 // shape["block_size"]) + 2)
    engine = toy.make_engine(
        shape.pop("drafter"),
        blocks=blocks,
        acceptance=acceptance,
        adaptive=switches[0],
        prefix_cache=switches[1],
        target=toy.ToyTarget(fail_on),
        **shape,
    )
    common = [rng.randrange(toy.VOCAB) for _ in range(30)]
    prompts = [[*common[: rng.randint(1, 30)], rng.randrange(toy.VOCAB)] for _ in wanted]
    clients = {i: ask(i, prompt, chosen) for i, (prompt, chosen) in enumerate(zip(prompts, wanted, strict=True))}
    for client in clients.values():
        client.request.client, client.request.priority = rng.choice("ab"), rng.choice((0, 0, 1))
    run(engine, clients, rng)
    check_books(engine, clients)
    for client in clients.values():
        request = client.request
        assert client.tokens == request.output
        if acceptance == "rejection" and request.params.temperature > 0:
            continue  # the law is the same, the text is not
        expected = alone(list(request.prompt), request.params, fail_on)
        if request.finish_reason is FinishReason.ABORT:
            assert request.output == expected.request.output[: len(request.output)]
        else:
            assert client.facts() == expected.facts()
