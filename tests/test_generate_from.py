"""An engine that is kept full: requests begin as others end, results lead to requests, and nothing stays behind."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import RequestError
from tests.models.tiny import make_module, make_tokenizer

MOST = 3


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_module("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return LLM(str(folder), drafter="none", kernels="plain", max_requests=MOST, num_slots=1000, threads=1)


def params(number: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=number, max_tokens=2 + 5 * (number % 4), ignore_eos=True)


def test_results_are_those_of_generate_and_the_engine_is_kept_full(llm):
    asks = iter([(number, [3 + number], params(number)) for number in range(9)])
    out, running = {}, []
    step = llm.engine.step

    def watched():
        running.append(len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting))
        return step()

    llm.engine.step = watched
    try:
        for number, result in llm.generate_from(lambda: next(asks, None)):
            out[number] = result.token_ids
    finally:
        llm.engine.step = step
    assert out == {n: llm.generate([3 + n], params(n))[0].token_ids for n in range(9)}
    assert list(out) != sorted(out), "a short reply does not wait for a long one"
    assert max(running) == MOST
    assert running == sorted(running, reverse=True), "full until the asks run out"


def test_a_result_may_lead_to_the_next_request(llm):
    waiting, texts = [[5, 6]], []
    for _, result in llm.generate_from(lambda: (None, waiting.pop(), params(2)) if waiting else None):
        texts.append(result.token_ids)
        if len(texts) < 4:
            waiting.append([5, 6, *result.token_ids])
    assert len(texts) == 4
    assert texts[1] == llm.generate([5, 6, *texts[0]], params(2))[0].token_ids


def test_samples_share_their_tag(llm):
    asks = iter([("both", [7], SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=4, ignore_eos=True))])
    found = list(llm.generate_from(lambda: next(asks, None)))
    assert [tag for tag, _ in found] == ["both", "both"]
    assert found[0][1].token_ids != found[1][1].token_ids


def test_who_stops_reading_leaves_nothing_behind(llm):
    results = llm.generate_from(lambda: (0, [8], params(3)))
    next(results)
    results.close()
    assert llm.engine.scheduler.is_idle
    asks = iter([(0, [8], params(3)), (1, [10**6], params(3))])
    with pytest.raises(RequestError, match="is no id of this model"):
        list(llm.generate_from(lambda: next(asks, None)))
    assert llm.engine.scheduler.is_idle
