"""`outrider serve` as it is run: its options arrive, it serves, and SIGTERM ends it cleanly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields

import httpx
import pytest

from outrider.cli.options import described
from outrider.errors import ConfigError
from outrider.server.settings import ServeConfig
from tests.server.tiny_chat import save_tiny_chat

GIVEN = {
    "--host 0.0.0.0": ("host", "0.0.0.0"),
    "--port 9000": ("port", 9000),
    "--served-name me": ("served_name", "me"),
    "--api-key-file {keys}": ("api_key_file", "{keys}"),
    "--allow-origin *": ("allow_origin", "*"),
    "--max-queue 3": ("max_queue", 3),
    "--max-body 99": ("max_body", 99),
    "--max-samples 2": ("max_samples", 2),
    "--max-prompt-tokens 7": ("max_prompt_tokens", 7),
    "--max-output-tokens 8": ("max_output_tokens", 8),
    "--max-logprobs 1": ("max_logprobs", 1),
    "--request-timeout 2.5": ("request_timeout", 2.5),
    "--shutdown-grace 1": ("shutdown_grace", 1.0),
    "--good-first-token 0.5": ("good_first_token", 0.5),
    "--good-token 0.05": ("good_token", 0.05),
    "--no-page": ("page", False),
}


@pytest.mark.parametrize("words", GIVEN)
def test_values_arrive(run, engines, monkeypatch, tmp_path, words) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    made = []

    def of(llm, config):
        made.append(config)
        raise ConfigError("that will do")

    monkeypatch.setattr("outrider.server.service.Server.of", of)
    name, value = GIVEN[words]
    value = str(keys) if value == "{keys}" else value
    assert run("serve", "m", *words.replace("{keys}", str(keys)).split()).code == 2
    assert made == [ServeConfig(**{name: value})]
    assert engines[0].closed


def test_no_field_is_left_out() -> None:
    expected = {field.name for field in fields(ServeConfig)}
    assert {name for name, _ in GIVEN.values()} == expected == described(ServeConfig).keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--port 70000", "ports end at 65535"),
        ("--max-queue -1", "max_queue=-1"),
        ("--request-timeout 0", "request_timeout=0"),
        ("--good-token 0", "good_token=0"),
        ("--api-key-file nowhere", "cannot be read"),
        ("--api-key-file {empty}", "holds no key"),
        ("--portt 1", "--portt"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(run, engines, tmp_path, words, said) -> None:
    (tmp_path / "empty").write_text("# none yet\n")
    ran = run("serve", "m", *words.replace("{empty}", str(tmp_path / "empty")).split())
    assert ran.code == 2
    assert said in ran.err
    assert engines == []


def test_it_serves_and_ends_at_sigterm(tmp_path) -> None:
    model = save_tiny_chat(tmp_path / "model")
    words = ["serve", model, "--port", "0", "--kernels", "plain", "--threads", "1", "--no-self-test"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-m", "outrider", *words], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        try:
            url = None
            while url is None:
                line = process.stderr.readline()
                assert line, "it ended before it served"
                found = re.search(r"http://[\d.]+:\d+", line)
                url = found and found[0]
            body = {"prompt": "ab", "max_tokens": 3, "seed": 1}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 3
        finally:
            process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) == 0
    lines = [json.loads(line) for line in rest.splitlines()]
    assert any(line.get("path") == "/v1/completions" and line["status"] == 200 for line in lines)
    assert lines[-1]["message"] == "stopped"
    assert "Traceback" not in rest
