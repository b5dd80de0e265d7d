"""Load on a server: what is summed up, and what a live one and broken ones give."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from outrider.errors import ConfigError
from outrider.measure.load import Client
from outrider.measure.load_page import rates
from outrider.measure.outcomes import Goal, Level, Observed, Sample
from tests.server.conftest import live, open_tiny
from tests.server.tiny_chat import save_tiny_chat

ASKED = [[{"role": "user", "content": "abc the"}], [{"role": "user", "content": "the"}]]


def observed(*samples: Sample, seconds: float = 10.0, is_plain: bool = False) -> Observed:
    made = Observed(Level(clients=4), is_plain=is_plain)
    made.add(samples, seconds, {"verify": 2.0})
    return made


def test_an_outcome_sums_up_and_counts_what_was_good() -> None:
    told = {"cycles": 4, "accepted": 6, "accepted_by_position": [4, 2], "speed_up": {"ratio": 1.5}}
    samples = [
        Sample(0, seconds=2.0, first=1.0, gaps=[0.5, 0.5], tokens=11, speculation=told),
        Sample(1, seconds=5.0, first=3.0, gaps=[2.0], tokens=5, speculation={"cycles": 2, "accepted": 0}),
        Sample(2, seconds=0.1, error="status 429"),
        Sample(3, seconds=0.1, error="status 429"),
    ]
    found = observed(*samples).outcome("4 clients", Goal(first_token=2.0, token=0.2), ["qa", "rag"])
    assert (found.level, found.requests, found.failed, found.errors) == ("4 clients", 4, 2, {"status 429": 2})
    assert found.tokens_per_second == 1.6
    assert found.requests_per_second == 0.2
    assert found.goodput == 0.1  # the second one's first token is late
    assert (found.tau, found.accepted_by_position, found.estimated) == (1 + 6 / 6, [4, 2], 1.5)
    assert rates(found.to_json()) == [4 / 6, 2 / 4]
    assert found.between["p50"] == 0.5
    assert found.token["p50"] == pytest.approx((0.1 + 0.5) / 2)
    assert json.loads(json.dumps(found.to_json()))["whole"]["p50"] == 3.5
    # Requests ask the prompts in turns: the first and the third are of one task.
    assert [(each["requests"], each["failed"], each["tau"]) for each in found.by_task.values()] == [
        (2, 1, 2.5),
        (2, 1, 1.0),
    ]


def test_a_ratio_is_of_the_same_requests_prompt_by_prompt() -> None:
    """By hand: prompt 0 had 30 tokens in 4 + 2 s where plain took 9 (1.5), prompt 1 10 in 1 s for 2 (2); 3 failed."""
    rows = [(0, 4.0, 20, 6.0), (1, 1.0, 10, 2.0), (2, 2.0, 10, 3.0)]
    mine = [Sample(number, seconds=seconds, tokens=tokens) for number, seconds, tokens, _ in rows]
    plain = [Sample(number, seconds=seconds, tokens=tokens) for number, _, tokens, seconds in rows]
    mine.append(Sample(3, seconds=0.1, tokens=9, error="status 500"))
    plain.append(Sample(3, seconds=9.0, tokens=9))
    base = observed(*plain[::-1], is_plain=True)
    found = observed(*mine).outcome("x", Goal(), ["qa", "rag"], base)
    assert found.ratio["ratio"] == pytest.approx((1.5 + 2.0) / 2)
    assert found.by_task["qa"]["ratio"]["ratio"] == pytest.approx(1.5)
    assert base.outcome("y", Goal(), ["qa", "rag"]).ratio is None
    mine[1].error = "status 500"
    found = observed(*mine).outcome("x", Goal(), ["qa", "rag"], base)
    assert found.by_task["rag"]["ratio"] is None


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with live(open_tiny(save_tiny_chat(tmp_path_factory.mktemp("load")))) as server:
        yield server


@pytest.mark.parametrize("level", [Level(clients=3), Level(rate=50.0)], ids=str)
def test_a_live_server_under_clients_and_under_arrivals(served, level) -> None:
    client = Client(f"{served.url}/v1/", None, None, {"max_tokens": 12, "temperature": 0, "ignore_eos": True})
    samples, seconds = asyncio.run(client.run(level, ASKED, 7))
    assert [sample.error for sample in samples] == [None] * 7
    assert [sample.tokens for sample in samples] == [12] * 7
    assert all(0 < sample.first <= sample.seconds <= seconds for sample in samples)
    assert all(sum(sample.gaps) <= sample.seconds for sample in samples)
    assert sorted(sample.number for sample in samples) == list(range(7))
    seen = Observed(level)
    seen.add(samples, seconds, {})
    assert seen.outcome(str(level), Goal(), ["qa"] * 2).tau >= 1
    served.settle()


@contextmanager
def broken(status: int, lines: bytes, pause: float = 0.0) -> Iterator[str]:
    """A server that answers every question like this, and then pauses."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(lines)
            self.wfile.flush()
            time.sleep(pause)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


TEXT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


@pytest.mark.parametrize(
    ("status", "lines", "said"),
    [
        (429, b"", "status 429"),
        (200, b'data: {"error": {"message": "no"}}\n\n', "an error within the stream"),
        (200, TEXT, "the stream broke off"),
        (200, TEXT + b"data: [DONE]\n\n", "no usage told: tokens are not known"),
        (200, b"data: {nonsense\n\n", "no stream of OpenAI's shape"),
        (200, b'data: {"choices": [{"text": "a"}]}\n\n', "no stream of OpenAI's shape"),
        (200, b"data: [1]\n\n", "no stream of OpenAI's shape"),
    ],
)
def test_what_fails_is_counted_and_never_a_number(status, lines, said) -> None:
    with broken(status, lines) as url:
        samples, seconds = asyncio.run(Client(url, "m", None, {}).run(Level(clients=2), ASKED, 4))
    seen = Observed(Level(clients=2))
    seen.add(samples, seconds, {})
    found = seen.outcome("2 clients", Goal(), ["qa"] * 2)
    assert found.errors == {said: 4}
    assert (found.goodput, found.tokens_per_second, found.first_token) == (0, 0, {})


def test_an_answer_that_takes_too_long_has_failed() -> None:
    began = time.perf_counter()
    with broken(200, TEXT, pause=3.0) as url:
        samples, _ = asyncio.run(Client(url, "m", None, {}, timeout=0.3).run(Level(clients=2), ASKED, 2))
        assert time.perf_counter() - began < 3.0
    assert [sample.error for sample in samples] == ["no end within 0.3 s"] * 2


def test_a_server_that_is_not_there_is_told_of() -> None:
    with pytest.raises(ConfigError, match="is it up"):
        asyncio.run(Client("http://127.0.0.1:9", None, None, {}).run(Level(clients=1), ASKED, 1))
