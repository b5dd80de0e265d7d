"""Which samples come in time: by the clock, and over HTTP by the goals a server was started with."""

from __future__ import annotations

import pytest

from outrider import LLM
from outrider.server.goodput import WINDOW, Goodput
from tests.server.conftest import live

BODY = {"prompt": "abc the", "max_tokens": 6, "seed": 1, "ignore_eos": True, "n": 2}


def test_goals() -> None:
    goodput = Goodput(first_token=1.0, token=0.1)
    assert goodput.judge(first=1.0, whole=1.0 + 9 * 0.1, count=10)
    assert not goodput.judge(first=1.1, whole=1.2, count=10)
    assert not goodput.judge(first=0.5, whole=0.5 + 9 * 0.11, count=10)
    assert goodput.judge(first=0.5, whole=0.5, count=1)
    assert goodput.judge(first=0.5, whole=0.5, count=0)


def test_rates_are_of_lately() -> None:
    now = [100.0]
    goodput = Goodput(first_token=1.0, token=0.1, clock=lambda: now[0])
    assert goodput.rates() == (0.0, 0.0)
    now[0] += 10.0
    goodput.judge(0.5, 0.5, 1)
    goodput.judge(1.5, 1.5, 1)
    goodput.miss()
    assert goodput.rates() == (0.1, 0.3)  # a server that is young has had no more time than that
    now[0] += WINDOW - 5.0
    assert goodput.rates() == (1 / WINDOW, 3 / WINDOW)
    now[0] += 6.0
    assert goodput.rates() == (0.0, 0.0)


@pytest.mark.parametrize(
    ("goals", "good"), [({"good_first_token": 1e9, "good_token": 1e9}, 2), ({"good_token": 1e-9}, 0)]
)
def test_samples_are_judged_as_they_end(llm: LLM, goals: dict[str, float], good: int) -> None:
    with live(llm, **goals) as server, server.http() as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200
        assert f"outrider_request_good_total {good:.1f}" in http.get("/metrics").text
        rate, ended = server.server.metrics.goodput.rates()
        assert (rate > 0) == (good > 0)
        assert ended > 0


def test_whoever_is_given_up_was_not_good(llm: LLM) -> None:
    with live(llm, good_first_token=1e9, good_token=1e9, request_timeout=0.001) as server, server.http() as http:
        assert http.post("/v1/completions", json={**BODY, "max_tokens": 400}).status_code == 504
        rate, ended = server.server.metrics.goodput.rates()
        assert rate == 0 < ended
