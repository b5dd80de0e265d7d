"""Many clients at once, clients that leave, a full queue, deadlines, keys, limits, and the end of the server."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import httpx
import openai
import pytest

from outrider import SamplingParams
from tests.server.conftest import Live, live, open_tiny
from tests.server.test_refusals import refusal

LONG = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def small(folder):
    """Few slots, so that requests wait and are preempted."""
    return open_tiny(folder, num_slots=704, max_context=512, block_size=4, max_requests=8)


async def _client(url: str, number: int, rng: random.Random, texts: dict[int, str]) -> None:
    """Asks, whole or streamed, and leaves in the middle at times."""
    body = {"prompt": f"abc the {number}", "seed": number, "max_tokens": 40, "stream": number % 2 == 0}
    leaves = rng.random() < 0.4
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as http:
        await asyncio.sleep(rng.random() * 0.3)
        try:
            async with asyncio.timeout(rng.random() * 0.5 if leaves else 60):
                if not body["stream"]:
                    answer = await http.post("/v1/completions", json=body)
                    texts[number] = answer.json()["choices"][0]["text"]
                    return
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    lines = [line async for line in answer.aiter_lines() if line]
                    assert lines[-1] == "data: [DONE]"
                    texts[number] = "".join(
                        choice["text"]
                        for line in lines[:-1]
                        for choice in httpx.Response(200, text=line[6:]).json()["choices"]
                    )
        except TimeoutError:
            assert leaves


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_thirty_two_clients_of_whom_some_leave(small, seed) -> None:
    """Fault 30: all slots return, and nobody's text suffers."""
    rng, texts = random.Random(seed), {}

    async def all_of_them(url: str) -> None:
        await asyncio.gather(*(_client(url, number, rng, texts) for number in range(32)))

    with live(small) as served:
        asyncio.run(all_of_them(served.url))
        served.settle()
    assert len(texts) > 10
    for number, text in texts.items():
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=40)
        assert small.generate(f"abc the {number}", params, raw=True)[0].text == text


def test_one_that_leaves_frees_its_slots_within_a_cycle(small) -> None:
    with live(small) as served, served.http() as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            (request,) = small.engine.scheduler.running
        deadline = time.monotonic() + 5
        while not request.is_finished and time.monotonic() < deadline:
            time.sleep(0.002)
        assert str(request.finish_reason) == "abort"
        assert len(request.output) < LONG["max_tokens"]
        served.settle()


def _hold(served: Live, count: int) -> list[threading.Thread]:
    """Clients that keep the engine busy."""

    def ask() -> None:
        with served.http() as http:
            http.post("/v1/completions", json=LONG)

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while served.server.bridge.num_open < count and time.monotonic() < deadline:
        time.sleep(0.002)
    return threads


def test_a_full_queue_says_when_to_come_again(folder) -> None:
    with live(open_tiny(folder, max_requests=1), max_queue=1) as served, served.http() as http:
        held = _hold(served, 2)
        for stream in (False, True):
            answer = http.post("/v1/completions", json={**LONG, "stream": stream})
            error = refusal(answer, 429)
            assert error["type"] == "rate_limit_error"
            assert "the queue holds 2" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            served.openai().completions.create(model="tiny", prompt="a")
        assert 'outrider_requests_refused_total{reason="queue_full"} 3.0' in http.get("/metrics").text
        for thread in held:
            thread.join()
        served.settle()
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
        refusal(http.post("/v1/completions", json={**LONG, "n": 3}), 400)


def test_a_deadline_ends_a_request(small, monkeypatch) -> None:
    with live(small, request_timeout=0.2) as served, served.http() as http:
        wait = {**LONG, "timeout": 100.0}
        assert "not done after" in refusal(http.post("/v1/completions", json=wait), 504)["message"]
        served.settle()
        with http.stream("POST", "/v1/completions", json={**wait, "stream": True}) as answer:
            last = [line for line in answer.iter_lines() if line][-1]
        assert "not done after" in last
        served.settle()
    step = small.engine.step
    monkeypatch.setattr(small.engine, "step", lambda: time.sleep(0.1) or step())
    with live(small) as served, served.http() as http:
        refusal(http.post("/v1/completions", json={**LONG, "timeout": 1}), 504)
        served.settle()


def test_keys(small, tmp_path) -> None:
    (tmp_path / "keys").write_text("# ours\nfirst-key\n\nsecond-key\n")
    with live(small, api_key_file=str(tmp_path / "keys")) as served, served.http() as http:
        body = {"prompt": "ab", "max_tokens": 2}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first-key"}, {"Authorization": ""}):
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/nothing"):
                answer = http.post(path, json=body, headers=headers)
                assert refusal(answer, 401)["type"] == "authentication_error"
            assert http.get("/metrics", headers=headers).status_code == 401
        for path in ("/health", "/ready", "/"):
            assert http.get(path).status_code == 200
        for key in ("first-key", "second-key"):
            assert served.openai(api_key=key).completions.create(model="tiny", prompt="ab", max_tokens=2).choices
        with pytest.raises(openai.AuthenticationError):
            served.openai(api_key="# ours").completions.create(model="tiny", prompt="ab")


def test_limits_of_bodies_and_tokens(small) -> None:
    with live(small, max_body=2000, max_prompt_tokens=20, max_output_tokens=5, max_samples=2) as served:
        with served.http() as http:
            big = b'{"prompt": "' + b"a" * 3000 + b'"}'
            kind = {"Content-Type": "application/json"}
            assert "2000 bytes" in refusal(http.post("/v1/completions", content=big, headers=kind), 413)["message"]
            chunks = (big[start : start + 100] for start in range(0, len(big), 100))
            refusal(http.post("/v1/completions", content=chunks, headers=kind), 413)
            for more, said in (({"prompt": "ab" * 30}, "20 are allowed"), ({"max_tokens": 6}, "5 that are allowed")):
                error = refusal(http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2, **more}))
                assert said in error["message"]
            refusal(http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "max_tokens": 2}))
            messages = [{"role": "user", "content": ""}]
            chat = http.post("/v1/chat/completions", json={"messages": messages, "ignore_eos": True}).json()
            assert chat["usage"]["completion_tokens"] == 5
            messages[0]["content"] = "ab" * 30
            assert (
                "20 are allowed" in refusal(http.post("/v1/chat/completions", json={"messages": messages}))["message"]
            )
        served.settle()


def test_no_other_origin_may_ask_unless_it_is_named(small) -> None:
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with live(small) as served, served.http() as http:
        assert "access-control-allow-origin" not in http.options("/v1/completions", headers=ask).headers
        assert "access-control-allow-origin" not in http.get("/v1/models", headers=ask).headers
    with live(small, allow_origin="https://a.example") as served, served.http() as http:
        allowed = http.options("/v1/completions", headers=ask)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"


def _stopped(served: Live, **more: object) -> list[str]:
    """The lines of a stream during which the server is told to stop."""
    with served.http() as http, http.stream("POST", "/v1/completions", json={**LONG, "stream": True, **more}) as answer:
        lines = answer.iter_lines()
        found = [next(lines)]
        served.runner.stop()
        return found + [line for line in lines if line]


def test_a_server_that_stops_finishes_what_runs(small) -> None:
    with live(small, shutdown_grace=20.0) as served:
        assert _stopped(served, max_tokens=100)[-1] == "data: [DONE]"
        assert not served.server.bridge.is_alive or served.server.bridge.is_closing


def test_a_server_that_stops_fails_what_takes_too_long(small) -> None:
    with live(small, shutdown_grace=0.0) as served:
        last = _stopped(served, n=4)[-1]
        assert "the server is shutting down" in last
    assert small.engine.scheduler.is_idle
    assert small.engine.ledger.pool.num_held == 0


def test_a_drained_bridge_takes_nothing(small) -> None:
    with live(small) as served, served.http() as http:
        served.server.bridge.drain()
        answer = http.post("/v1/completions", json=LONG)
        assert "shutting down" in refusal(answer, 503)["message"]
        assert answer.headers["retry-after"]
        assert http.get("/ready").status_code == 503
        assert http.get("/health").status_code == 200
        served.server.bridge.close()
        assert http.get("/health").status_code == 503
