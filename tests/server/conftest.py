"""A live server on a free port over a tiny model, and the clients that people use."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from outrider import LLM
from outrider.server.run import Runner
from outrider.server.service import Server
from outrider.server.settings import ServeConfig
from tests.server.tiny_chat import save_tiny_chat

NAME = "tiny"


@dataclass(frozen=True)
class Live:
    """A server that listens."""

    url: str
    llm: LLM
    server: Server
    runner: Runner

    def openai(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, **{"api_key": "none", **settings})

    def http(self, **settings: Any) -> httpx.Client:
        """It reads no certificates, which takes longer than most of what is asked."""
        return httpx.Client(base_url=self.url, timeout=60, verify=False, **settings)

    def settle(self) -> None:
        """Wait until nothing runs, and look whether anything was left behind."""
        deadline = time.monotonic() + 20
        while self.server.bridge.num_open or not self.llm.engine.scheduler.is_idle:
            assert time.monotonic() < deadline, "requests are left over"
            time.sleep(0.01)
        assert self.llm.engine.ledger.pool.num_held == 0, "slots leaked"
        assert not self.llm._inboxes


@contextmanager
def live(llm: LLM, **settings: Any) -> Iterator[Live]:
    """Serve an engine within the block."""
    config = ServeConfig(**{"port": 0, "served_name": NAME, "shutdown_grace": 5.0, **settings})
    runner = Runner(Server.of(llm, config))
    listening = runner.open()
    thread = threading.Thread(target=runner.serve_until_stopped, args=(listening,), daemon=True)
    thread.start()
    port = listening.getsockname()[1]
    try:
        while not runner.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield Live(f"http://127.0.0.1:{port}", llm, runner.parts, runner)
    finally:
        if thread.is_alive():
            runner.stop()
        thread.join(30)
        assert not thread.is_alive(), f"the server did not stop\n{whereabouts(runner)}"


def whereabouts(runner: Runner) -> str:
    """Where every thread is just now, and every task of the server's event loop."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        for server in runner.servers:
            for task in asyncio.all_tasks(server.get_loop()):
                task.print_stack(file=file)
        file.seek(0)
        return file.read()


def open_tiny(folder: str, **settings: Any) -> LLM:
    """An engine that guesses in every cycle, so that bursts are the rule."""
    given = {"drafter": "ngram", "depth": 4, "adaptive": False, "kernels": "plain", "num_slots": 8192, "threads": 1}
    return LLM(folder, **{**given, "self_test": False, **settings})


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_chat(tmp_path_factory.mktemp("tiny-chat"))


@pytest.fixture(scope="session")
def llm(folder: str) -> LLM:
    return open_tiny(folder)


@pytest.fixture(scope="session")
def served(llm: LLM) -> Iterator[Live]:
    with live(llm) as server:
        yield server


@pytest.fixture(scope="session")
def client(served: Live) -> openai.OpenAI:
    return served.openai()


@pytest.fixture(scope="session")
def events() -> Callable[[httpx.Client, str, dict[str, Any]], Iterator[Any]]:
    """The JSON events of a stream, read as raw SSE, the last of which must be `[DONE]` or an error."""

    def read(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[Any]:
        last = None
        with http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                if not line:
                    continue
                assert line.startswith("data: ")
                assert last != "[DONE]"
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    yield json.loads(last)
        assert last == "[DONE]" or "error" in json.loads(last)

    return read
