"""`outrider deploy` as a user runs it: two servers of a tiny model, asked, streamed, and one of them killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from outrider import LLM, SamplingParams
from tests.listening import address_of, environment
from tests.server.tiny_chat import save_tiny_chat

BODY = {"prompt": "abc the", "max_tokens": 12, "seed": 5, "temperature": 1, "ignore_eos": True}


def words(model: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "outrider", "deploy", model, "--threads", "1", "--drafter", "ngram", *more]


@contextmanager
def deployed(model: str, cache: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = words(model, "--port", "0", "--kernels", "plain", "--ray-address", "local", *more)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment(cache, RAY_USAGE_STATS_ENABLED="0")
    ) as process:
        try:
            yield process, address_of(process)
        finally:
            process.terminate()
            process.wait(timeout=120)


def replicas_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the servers that run for a deployment."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    found = [line.split(maxsplit=1) for line in listed.splitlines() if "ServeReplica:outrider:replica" in line]
    return [int(pid) for pid, _ in found]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_servers_of_a_tiny_model(tmp_path) -> None:
    pytest.importorskip("ray", reason='needs "outrider[ray]"')
    model = save_tiny_chat(tmp_path / "model")
    llm = LLM(model, drafter="ngram", kernels="plain", threads=1)
    params = SamplingParams(max_tokens=12, seed=5, temperature=1, ignore_eos=True)
    (expected,) = llm.generate(BODY["prompt"], params, raw=True)
    llm.close()
    with (
        deployed(model, tmp_path / "cache", "--replicas", "2", "--cpus", "0.5") as (process, url),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        names = set()
        for _ in range(40):
            answer = http.post("/v1/completions", json=BODY)
            assert answer.json()["choices"][0]["text"] == expected.text
            names.add(answer.headers["x-outrider-replica"])
        assert len(names) == len(http.get("/health").json()["replicas"]) == 2
        assert len(http.post("/v1/completions", json={**BODY, "stream": True}).text.split("\n\n")) > 3
        refused = http.post("/v1/completions", json={**BODY, "best_of": 2})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "best_of"
        assert http.get("/v1/models").json()["data"][0]["drafter"] == "ngram"
        assert "text/html" in http.get("/").headers["content-type"]
        victim = replicas_of(process)[0]
        os.kill(victim, signal.SIGSTOP)  # one that hangs hides nobody else
        time.sleep(1.1)
        assert len(http.get("/health").json()["replicas"]) == 1
        os.kill(victim, signal.SIGKILL)
        for _ in range(20):
            assert http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == expected.text
        deadline = time.monotonic() + 120
        while len(there := {one["replica"] for one in http.get("/health").json()["replicas"]}) < 2 or there == names:
            assert time.monotonic() < deadline, f"no other server came: {there}"
            time.sleep(1)
        text = http.get("/metrics").text
        assert re.search(r"^outrider_generation_tokens_total [1-9]", text, re.MULTILINE)
    assert process.returncode == 0
