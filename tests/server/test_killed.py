"""`kill -9` in the middle of a first start and of requests: it serves again as soon, and nothing is broken."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.listening import address_of, environment
from tests.server.tiny_chat import save_tiny_chat

BODY = {"prompt": "abc the", "max_tokens": 12, "seed": 5, "temperature": 1, "ignore_eos": True}


@dataclass(frozen=True)
class Started:
    """A server in a process of its own, which took so many seconds until it listened."""

    process: subprocess.Popen[str]
    url: str
    seconds: float


def spawn(model: str, cache: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "outrider", "serve", model, "--port", "0", "--threads", "1", "--drafter", "ngram"]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment(cache))


@contextmanager
def started(model: str, cache: Path) -> Iterator[Started]:
    """Serve until the end of the block, at which it is killed."""
    began = time.monotonic()
    with spawn(model, cache) as process:
        try:
            url = address_of(process)
            yield Started(process, url, time.monotonic() - began)
        finally:
            process.kill()


def text_of(server: Started) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def files(*folders: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_server_serves_again(tmp_path) -> None:
    model, cache = save_tiny_chat(tmp_path / "model"), tmp_path / "cache"
    for seconds in (0.0, 2.0):  # in the middle of what a first start writes: kernels are compiled in it
        with spawn(model, cache) as process:
            while not any(cache.rglob("*")):
                assert process.poll() is None, "it ended before it wrote anything"
                time.sleep(0.01)
            time.sleep(seconds)
            process.kill()
    with started(model, cache) as first:
        expected = text_of(first)
    before = files(cache, tmp_path / "model")
    with started(model, cache) as warm:
        assert text_of(warm) == expected
        body = {**BODY, "max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{warm.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            warm.process.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
    with started(model, cache) as again:
        assert text_of(again) == expected
        assert again.seconds < 1.25 * warm.seconds + 1
    assert files(cache, tmp_path / "model") == before
