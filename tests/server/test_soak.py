"""Random load: aborts, floods, malformed bodies, slow readers, killed clients; no leak, no wrong answer, no other 5xx.

It takes OUTRIDER_SOAK_SECONDS, 90 if that is not set.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import struct
import time
from pathlib import Path

import httpx
import pytest

from outrider import SamplingParams
from tests.server.conftest import Live, live, open_tiny

SECONDS = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "90"))
CLIENTS = 12
ALLOWED = {200, 400, 404, 405, 413, 429, 504}


def memory() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def body(rng: random.Random) -> dict:
    """Something that may be asked, from few enough to be compared with what each gives alone."""
    asked = {
        "prompt": f"abc the {rng.randrange(6)} " * rng.choice((1, 1, 12)),
        "seed": rng.randrange(3),
        "max_tokens": rng.choice((1, 7, 40, 90)),
        "temperature": rng.choice((0, 1)),
    }
    more = rng.choice(({}, {"stop": "a"}, {"frequency_penalty": 1}, {"top_k": 5}, {"grammar": {"regex": "[a-f]{9}"}}))
    return {**asked, **more}


class Soak:
    """What the clients do, and what they got."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self.url = url
        self.rng = rng
        self.texts: dict[str, str] = {}
        self.statuses: dict[int, int] = {}
        self.until = time.monotonic() + SECONDS

    def asks(self) -> dict:
        """Fields on which no text depends."""
        more = (
            {},
            {},
            {"priority": 1},
            {"timeout": 30},
            {"speculation": {"enabled": False}},
            {"speculation": {"depth": 2}},
        )
        return self.rng.choice(more)

    def got(self, asked: dict, text: str) -> None:
        key = json.dumps(asked, sort_keys=True)
        assert self.texts.setdefault(key, text) == text, f"two texts for {key}"

    async def client(self) -> None:
        while time.monotonic() < self.until:
            good = (self.whole, self.many, self.chat, self.stream)
            bad = (self.leave, self.killed, self.malformed, self.flood, self.bomb, self.deaf)
            headers = {"X-Forwarded-For": f"10.0.0.{self.rng.randrange(4)}"}
            async with httpx.AsyncClient(base_url=self.url, timeout=120, headers=headers) as http:
                await self.rng.choice((*good, *bad))(http)

    async def whole(self, http: httpx.AsyncClient) -> None:
        asked = body(self.rng)
        answer = await http.post("/v1/completions", json=asked | self.asks())
        self.count(answer.status_code)
        if answer.status_code == 200:
            self.got(asked, answer.json()["choices"][0]["text"])

    async def many(self, http: httpx.AsyncClient) -> None:
        asked = body(self.rng)
        answer = await http.post("/v1/completions", json={**asked, "n": 3} | self.asks())
        self.count(answer.status_code)
        if answer.status_code == 200:
            texts = [choice["text"] for choice in answer.json()["choices"]]
            self.got(asked, texts[0])
            self.got({**asked, "n": 3}, json.dumps(texts))

    async def chat(self, http: httpx.AsyncClient) -> None:
        asked = body(self.rng)
        messages = [{"role": "user", "content": asked.pop("prompt")}]
        answer = await http.post("/v1/chat/completions", json={**asked, "messages": messages} | self.asks())
        self.count(answer.status_code)
        if answer.status_code == 200:
            self.got({**asked, "messages": messages}, answer.json()["choices"][0]["message"]["content"])

    async def stream(self, http: httpx.AsyncClient) -> None:
        asked, text, is_slow = body(self.rng), "", self.rng.random() < 0.3
        async with http.stream("POST", "/v1/completions", json={**asked, "stream": True} | self.asks()) as answer:
            self.count(answer.status_code)
            if answer.status_code != 200:
                return
            async for line in answer.aiter_lines():
                if is_slow:
                    await asyncio.sleep(self.rng.random() * 0.05)
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return
                    text += "".join(choice["text"] for choice in event["choices"])
        self.got(asked, text)

    async def leave(self, http: httpx.AsyncClient) -> None:
        try:
            async with asyncio.timeout(self.rng.random() * 0.2):
                await http.post("/v1/completions", json={**body(self.rng), "n": self.rng.choice((1, 3))})
        except TimeoutError:
            self.count(0)

    async def killed(self, _: httpx.AsyncClient) -> None:
        """A client that is gone: its connection is reset in the middle of its body, or of its stream."""
        sent = json.dumps({**body(self.rng), "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}"
        )
        reader, writer = await asyncio.open_connection(*self.url.removeprefix("http://").split(":"))
        whole = head.encode() + b"\r\n\r\n" + sent
        writer.write(whole if self.rng.random() < 0.7 else whole[: self.rng.randrange(len(whole))])
        await writer.drain()
        try:
            async with asyncio.timeout(self.rng.random() * 0.2):
                await reader.readexactly(600)
        except (TimeoutError, asyncio.IncompleteReadError):
            pass
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        self.count(0)

    async def malformed(self, http: httpx.AsyncClient) -> None:
        good = json.dumps(body(self.rng)).encode()
        cut = self.rng.randrange(len(good))
        many = b'{"prompt": ["' + b'", 0, "' * 9000 + b'"]}'
        junk = self.rng.choice((good[:cut], good[:cut] + b"\xff" + good[cut:], b"[" * 5000, b"x" * 300_000, many))
        path = self.rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/nothing"))
        answer = await http.post(path, content=junk, headers={"Content-Type": "application/json"})
        self.count(answer.status_code)
        assert answer.status_code != 200
        assert set(answer.json()) == {"error"}

    async def bomb(self, http: httpx.AsyncClient) -> None:
        """A grammar that is refused, when it is compiled or when its limits are met."""
        lark = "start: s\ns: s s | s s s | " + " | ".join(f'"{number}"' for number in range(self.rng.randrange(2000)))
        grammar = self.rng.choice(({"regex": "(a?){3000}a{3000}"}, {"lark": "start: start"}, {"lark": lark + " | "}))
        answer = await http.post("/v1/completions", json={**body(self.rng), "grammar": grammar, "timeout": 20})
        self.count(answer.status_code)

    async def deaf(self, http: httpx.AsyncClient) -> None:
        """A client that reads the first event of a stream, and then nothing for a while."""
        async with http.stream("POST", "/v1/completions", json={**body(self.rng), "stream": True, "n": 4}) as answer:
            self.count(answer.status_code)
            async for _ in answer.aiter_bytes():
                await asyncio.sleep(self.rng.random() * 3)
                break

    async def flood(self, http: httpx.AsyncClient) -> None:
        asked = {**body(self.rng), "max_tokens": 3}
        answers = await asyncio.gather(*(http.post("/v1/completions", json=asked) for _ in range(16)))
        for answer in answers:
            self.count(answer.status_code)
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) > 0
            elif answer.status_code == 200:
                self.got(asked, answer.json()["choices"][0]["text"])

    def count(self, status: int) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        assert status in ALLOWED | {0}


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 600)
def test_nothing_leaks_and_no_answer_is_wrong(folder) -> None:
    llm = open_tiny(folder, num_slots=1200, max_context=512, block_size=4, max_requests=8)
    warm = 0
    with live(llm, max_queue=24, max_body=100_000, request_timeout=60.0) as served:
        soak = Soak(served.url, random.Random(0))

        async def everybody() -> None:
            nonlocal warm
            clients = [asyncio.create_task(soak.client()) for _ in range(CLIENTS)]
            await asyncio.sleep(SECONDS / 3)
            gc.collect()
            warm = memory()
            await asyncio.gather(*clients)

        asyncio.run(everybody())
        served.settle()
        gc.collect()
        grown = memory() / warm
        with served.http() as http:
            assert http.get("/ready").json()["open"] == 0
    print(f"{SECONDS:.0f} s: statuses {dict(sorted(soak.statuses.items()))}, memory {grown:.3f} of what it was")
    print(f"{len(soak.texts)} different answers; {llm.engine.scheduler.num_preemptions} gave way")
    assert {200, 400, 429, 0} <= set(soak.statuses)
    assert len(soak.texts) > 50
    assert grown < 1.05, f"memory grew to {grown:.3f} of what it was"
    for key, text in soak.texts.items():
        assert alone(served, json.loads(key)) == text, key


def alone(served: Live, asked: dict) -> str:
    """What the engine gives for it by itself, plainly; of several samples, all texts."""
    grammar, messages = asked.pop("grammar", None), asked.pop("messages", None)
    if grammar:
        asked["automaton"] = served.server.preparer.grammars.regex(grammar["regex"])
    asked["stop"] = (asked["stop"],) if "stop" in asked else ()
    prompt = asked.pop("prompt", messages)
    floats = {name: float(asked[name]) for name in ("temperature", "frequency_penalty") if name in asked}
    params = SamplingParams(**{**asked, **floats, "speculation": False})
    results = served.llm.generate([prompt], params, raw=messages is None)
    return results[0].text if params.n == 1 else json.dumps([result.text for result in results])
