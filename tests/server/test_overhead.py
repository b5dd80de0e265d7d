"""What HTTP costs, and what a flood costs others, on the real model; both want a quiet machine of two cores."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from outrider import LLM, SamplingParams
from outrider.measure.load import messages_of
from outrider.measure.prompts import load_prompts
from tests.e2e.conftest import smollm2  # noqa: F401  # the fixture
from tests.server.conftest import Live, live

CLIENTS = 8
REQUESTS = 16
TOKENS = 128
ROUNDS = 5


def offline(llm: LLM) -> float:
    """Tokens a second of the engine, eight requests at a time."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, speculation=False)
    prompts = [messages_of(prompt) for prompt in load_prompts(None, None)]
    asks = iter([(number, prompts[number % len(prompts)], params) for number in range(REQUESTS)])
    began = time.perf_counter()
    results = list(llm.generate_from(lambda: next(asks, None)))
    assert [len(result.token_ids) for _, result in results] == [TOKENS] * REQUESTS
    return REQUESTS * TOKENS / (time.perf_counter() - began)


def served(server: Live) -> float:
    """The same as clients in another process see it."""
    body = {"ignore_eos": True, "speculation": {"enabled": False}}
    words = ["load", server.url, "--clients", str(CLIENTS), "--requests", str(REQUESTS), "--max-tokens", str(TOKENS)]
    ran = subprocess.run(
        [sys.executable, "-m", "outrider", *words, "--body", json.dumps(body), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    (load,) = json.loads(ran.stdout.splitlines()[-1])["loads"]
    assert load["failed"] == 0
    return load["tokens_per_second"]


def first_token(server: Live, num_others: int) -> float:
    """Median seconds to the first token of whoever asks one thing after the other, while another client asks so many at
    once.
    """
    stop, found = threading.Event(), []

    def other() -> None:
        with server.http(headers={"X-Forwarded-For": "10.0.0.1"}) as http:
            while not stop.is_set():
                http.post(
                    "/v1/completions",
                    json={"prompt": "The Loire is", "max_tokens": 40, "ignore_eos": True},
                    timeout=600,
                )

    threads = [threading.Thread(target=other) for _ in range(num_others)]
    for thread in threads:
        thread.start()
    with server.http(headers={"X-Forwarded-For": "10.0.0.2"}) as http:
        for number in range(25):
            time.sleep(0.3)
            body = {"prompt": f"{number} rivers of France:", "max_tokens": 8, "ignore_eos": True, "stream": True}
            began = time.perf_counter()
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                found.append(time.perf_counter() - began)
                assert list(lines)[-2] == "data: [DONE]"
    stop.set()
    for thread in threads:
        thread.join()
    server.settle()
    return statistics.median(found[5:])


@pytest.fixture
def server(smollm2: str) -> Iterator[Live]:  # noqa: F811
    llm = LLM(smollm2, drafter="ngram", threads=1, max_requests=CLIENTS, max_context=1024)
    with live(llm) as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_http_costs_at_most_a_twentieth(server: Live) -> None:
    offline(server.llm)  # what is read once is read
    rates = [(offline(server.llm), served(server)) for _ in range(ROUNDS)]
    ratio = statistics.median(there / here for here, there in rates)
    assert ratio >= 0.95, [f"{here:.0f} offline, {there:.0f} served" for here, there in rates]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_flood_makes_nobody_wait_who_has_a_share(server: Live) -> None:
    """Within 1.2 of the time beside a client that asks for what its share is and no more: all other seats."""
    first_token(server, CLIENTS - 1)
    rates = [(first_token(server, CLIENTS - 1), first_token(server, 64)) for _ in range(3)]
    ratio = statistics.median(flooded / fair for fair, flooded in rates)
    assert ratio <= 1.2, rates
