"""Whoever gives way to another client, at any moment and with any number of guesses, says the same (fault 27)."""

from __future__ import annotations

import pytest

from outrider.request import SamplingParams
from tests import toy
from tests.engine.test_same_text import plain_text, prompts

LENGTH = 10


@pytest.mark.parametrize("nodes", [0, 1, 3, 5])
@pytest.mark.parametrize("in_flight", [0, 2])
@pytest.mark.parametrize("drafter", ["small_model", "early_exit"])
def test_at_every_step_of_its_life(drafter: str, in_flight: int, nodes: int) -> None:
    """Before its prompt is read, between its chunks, while decoding, and with cycles of it on the device."""
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=3)
    texts = prompts(3, seed=6)
    expected = [plain_text(prompt, params, []) for prompt in texts]
    when_lost = []
    for moment in range(LENGTH):
        engine = toy.make_engine(drafter, depth=max(1, nodes), max_requests=2, max_rows=12, in_flight=in_flight)
        if not nodes:
            engine.control.depth = 0
        flood = [toy.make_request(number, texts[number], params) for number in range(2)]
        late = toy.make_request(2, texts[2], params)
        for request in flood:
            request.client = "flood"
            engine.add(request)
        for _ in range(moment):
            if not engine.scheduler.is_idle:
                engine.step()
        engine.add(late)
        assert toy.run(engine, []) == []
        assert [list(request.output) for request in (*flood, late)] == expected, moment
        assert engine.ledger.pool.num_held == 0
        if engine.scheduler.num_preemptions:
            when_lost.append(moment)
    assert len(when_lost) > 2, "the flood kept its seats"


def test_a_request_of_a_larger_number_gives_way_and_comes_back() -> None:
    params = SamplingParams(max_tokens=LENGTH)
    engine = toy.make_engine(max_requests=1)
    later, now = (toy.make_request(number, prompt, params) for number, prompt in enumerate(prompts(2, seed=6)))
    later.priority = 1
    ended = []
    for request in (later, now):
        engine.add(request)
        for _ in range(4):
            engine.step()
    while not engine.scheduler.is_idle:
        emissions, _ = engine.step()
        ended += [emission.request for emission in emissions if emission.request.is_finished]
    assert ended == [now, later]
    assert later.output == plain_text(list(later.prompt), params, [])
