"""The command line under `torchrun`: one process speaks, texts are exact, and a server answers and stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

import outrider
from tests.models.tiny import make_module, make_tokenizer

pytestmark = pytest.mark.slow
ENGINE = ["--tensor-parallel", "2", "--device", "cpu", "--threads", "1", "--max-context", "96"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    make_module("llama", num_key_value_heads=4).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "outrider"]
    environment = {**os.environ, "PYTHONPATH": str(Path(outrider.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, *words, *ENGINE], env=environment, text=True, **pipes)


def test_check_finds_no_difference_and_one_process_tells(folder: str, tmp_path) -> None:
    lines = [json.dumps({"prompt": " ".join(f"w{i * 3 + j}" for j in range(9))}) for i in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    words = ("check", folder, "--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "24", "--raw", "--json")
    job = start(*words, "--drafter", "ngram")
    said, notes = job.communicate(timeout=280)
    assert job.returncode == 0, notes[-3000:]
    (told,) = [json.loads(line) for line in said.splitlines()]
    assert told["compared"] > 0
    assert told["differing"] == 0


def test_a_refusal_is_said_once(folder: str) -> None:
    job = start("generate", folder, "w5", "--num-slots", "3", "--json")
    said, notes = job.communicate(timeout=280)
    assert job.returncode != 0
    assert [line for line in said.splitlines() if line.startswith("{")] == said.splitlines()[-1:]
    assert len([line for line in notes.splitlines() if line.startswith("outrider: ")]) == 1


def test_a_server_of_two_ranks_answers_and_stops(folder: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = start("serve", folder, "--port", str(port), "--drafter", "ngram")
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + 200
        while True:
            try:
                httpx.get(f"{url}/health", timeout=5)
                break
            except httpx.TransportError:
                assert job.poll() is None
                assert time.monotonic() < until
                time.sleep(0.2)
        body = {"model": folder, "prompt": "w5 w6 w7", "max_tokens": 20, "temperature": 1, "seed": 3}
        texts = [
            httpx.post(f"{url}/v1/completions", json={**body, **more}, timeout=60).json()["choices"][0]["text"]
            for more in ({}, {}, {"speculation": {"enabled": False}})
        ]
        assert len(set(texts)) == 1
    finally:
        job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
