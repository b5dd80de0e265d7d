"""Load on a server: what is summed up, and what a live one and broken ones give."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from outrider.errors import ConfigError
from outrider.measure.load import Client, Goal, Level, Sample, outcome
from tests.server.conftest import live, open_tiny
from tests.server.tiny_chat import save_tiny_chat

ASKED = [[{"role": "user", "content": "abc the"}], [{"role": "user", "content": "the"}]]


def test_an_outcome_sums_up_and_counts_what_was_good() -> None:
    told = {"cycles": 4, "accepted": 6}
    samples = [
        Sample(seconds=2.0, first=1.0, gaps=[0.5, 0.5], tokens=11, speculation=told),
        Sample(seconds=5.0, first=3.0, gaps=[2.0], tokens=5, speculation={"cycles": 2, "accepted": 0}),
        Sample(seconds=0.1, error="status 429"),
        Sample(seconds=0.1, error="status 429"),
    ]
    found = outcome("4 clients", samples, 10.0, Goal(first_token=2.0, token=0.2))
    assert (found.level, found.requests, found.failed, found.errors) == ("4 clients", 4, 2, {"status 429": 2})
    assert found.tokens_per_second == 1.6
    assert found.requests_per_second == 0.2
    assert found.goodput == 0.1  # the second one's first token is late
    assert found.tau == 1 + 6 / 6
    assert found.between["p50"] == 0.5
    assert found.token["p50"] == pytest.approx((0.1 + 0.5) / 2)
    assert json.loads(json.dumps(found.to_json()))["whole"]["p50"] == 3.5


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
    assert outcome(str(level), samples, seconds, Goal()).tau >= 1
    served.settle()


@contextmanager
def broken(status: int, lines: bytes) -> Iterator[str]:
    """A server that answers every question like this."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(lines)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "lines", "said"),
    [(429, b"", "status 429"), (200, b'data: {"error": {"message": "no"}}\n\n', "an error within the stream")],
)
def test_what_fails_is_counted_and_never_a_number(status, lines, said) -> None:
    with broken(status, lines) as url:
        samples, seconds = asyncio.run(Client(url, "m", None, {}).run(Level(clients=2), ASKED, 4))
    found = outcome("2 clients", samples, seconds, Goal())
    assert found.errors == {said: 4}
    assert (found.goodput, found.tokens_per_second, found.first_token) == (0, 0, {})


def test_a_server_that_is_not_there_is_told_of() -> None:
    with pytest.raises(ConfigError, match="is it up"):
        asyncio.run(Client("http://127.0.0.1:9", None, None, {}).run(Level(clients=1), ASKED, 1))
