"""A server that is told to stop ends in bounded time, whatever its clients and its engine do."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable

import pytest

from outrider.server import app, run
from tests.server.conftest import Live, live, open_tiny

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: "
MUCH = {"prompt": "ab the " * 60, "max_tokens": 300, "ignore_eos": True, "logprobs": 20, "echo": True, "n": 16}
DEAF = json.dumps({**MUCH, "stream": True, "speculation": {"trace": True}})
SLOW = json.dumps({"prompt": "slow", "max_tokens": 2})
WORDS = {
    "nothing": "",
    "half a head": HEAD,
    "half a body": f"{HEAD}1000\r\n\r\n{{",
    "no ear for a stream": f"{HEAD}{len(DEAF)}\r\n\r\n{DEAF}",
    "a prompt that takes long to make": f"{HEAD}{len(SLOW)}\r\n\r\n{SLOW}",
}


@pytest.fixture
def go_on(monkeypatch):
    """What was made to hang goes on with it, at the test's end at the latest."""
    monkeypatch.setattr(run, "LAST_WORDS", 0.0)
    event = threading.Event()
    yield event
    event.set()


def say(served: Live, words: str) -> socket.socket:
    """A client that says so much, and neither reads nor leaves."""
    host, port = served.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    client.sendall(words.encode())
    return client


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_clients_that_hang_on_keep_no_server(folder, monkeypatch, go_on) -> None:
    with live(open_tiny(folder), shutdown_grace=0.0) as served:
        completion = served.server.preparer.completion

        def slow(ask):
            if ask.prompt == "slow":
                go_on.wait(60)
            return completion(ask)

        monkeypatch.setattr(served.server.preparer, "completion", slow)
        clients = [say(served, words) for words in WORDS.values()]
        until(lambda: served.llm.engine.scheduler.running and len(served.runner.server_state.tasks) == 3)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    for client in clients:
        client.settimeout(5)
        with client, contextlib.suppress(ConnectionResetError):
            while client.recv(1 << 16):
                pass


def test_an_engine_that_hangs_keeps_no_server(folder, monkeypatch, caplog, go_on) -> None:
    """As in a device's call that never returns."""
    monkeypatch.setattr(app, "LAST_PASS", 0.2)
    llm = open_tiny(folder, num_slots=2048)
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: go_on.wait(60) and step())
    with live(llm, shutdown_grace=0.0) as served, say(served, f"{HEAD}{len(SLOW)}\r\n\r\n{SLOW}"):
        until(lambda: llm.engine.scheduler.waiting)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert "has not ended after 0.2 s and is left" in caplog.text
