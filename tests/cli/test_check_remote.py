"""`check --endpoint`: what is printed, in which order, and how it exits."""

from __future__ import annotations

import json

import pytest

from outrider.cli.options import read_key
from outrider.server.settings import ServeConfig
from tests.measure.endpoint.double import Double

WORDS = ("check", "--endpoint", "http://x", "--limit", "1", "--draws", "40", "--max-tokens", "12")


@pytest.fixture
def serve(monkeypatch):
    """Every endpoint is the double with a fault; those that were opened."""
    opened = []

    def with_fault(fault):
        def open_double(url, model, key, route, at_once, timeout, key_option):
            opened.append((url, model, key, route, at_once, timeout, key_option))
            return Double(fault if url == "http://x" else None).endpoint(route=route, model=model)

        monkeypatch.setattr("outrider.cli.check_remote.Endpoint", open_double)
        return opened

    return with_fault


def test_a_sound_server_exits_0_and_json_tells_all(run, serve, tmp_path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    opened = serve(None)
    ran = run(*WORDS, "--api-key-file", str(key), "--at-once", "3", "--timeout", "9", "--raw", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert opened == [("http://x", None, "secret", "completions", 3, 9.0, "--api-key-file")]
    data = json.loads(ran.out)
    assert (data["broken"], data["url"], data["reference"]) == (0, "http://double", None)
    assert data["held"] == sum(finding["status"] == "held" for finding in data["findings"]) > 10
    assert "total variation" in data["power"]


def test_a_broken_server_exits_1_and_says_what_to_do(run, serve, tmp_path) -> None:
    opened = serve("usage miscounted")
    key = tmp_path / "key"
    key.write_text("of y\n")
    ran = run(*WORDS, "--reference", "http://y", "--reference-key-file", str(key), "--reference-model", "twin")
    assert ran.code == 1
    assert [each[:3] for each in opened] == [("http://x", None, None), ("http://y", "twin", "of y")]
    assert opened[1][-1] == "--reference-key-file"
    lines = ran.out.splitlines()
    assert "total variation" in lines[0]
    assert lines[1].startswith("BROKEN    ")
    assert "completion_tokens counts what was delivered" in ran.out
    assert any(line.startswith("held      greedy: against the reference: ") for line in lines)
    assert "2 broken" in lines[-1]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["check"], "give a MODEL"),
        (["check", "m", "--reference", "http://y"], "--reference goes with --endpoint URL"),
        (["check", "--endpoint", "http://x", "--drafter", "ngram"], "no engine options"),
        (["check", "--endpoint", "http://x", "--temperature", "1"], "leave them out"),
        (["check", "--endpoint", "http://127.0.0.1:9"], "is it up"),
        (["check", "--endpoint", "http://x", "--api-key-file", "no/key"], "api_key_file='no/key' cannot be read"),
        (["check", "--endpoint", "x:8000"], "is no address of a server"),
        (["check", "--endpoint", "http://x", "--tie", "nan"], "tie=nan is out of range"),
        (["check", "--endpoint", "http://x", "--timeout", "0"], "timeout=0.0 is out of range"),
        (["check", "--endpoint", "http://x", "--reference-model", "m"], "goes with --reference URL"),
        (["check", "m", "--api-key-file", "f"], "--api-key-file goes with --endpoint URL"),
        (["check", "m", "--draws", "80"], "--draws goes with --endpoint URL"),
    ],
)
def test_mistakes_are_one_sentence(run, words, part) -> None:
    ran = run(*words)
    assert (ran.code, ran.out) == (2, "")
    assert part in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no key: write one a line"),
        (b"# of the team\n\n", "holds no key: write one a line"),
        (b"\xffkey", "holds no key: give one of plain letters"),
        ("schl\u00fcssel".encode(), "holds no key: give one of plain letters"),
    ],
)
def test_a_key_that_no_header_carries_is_refused(run, tmp_path, content, said) -> None:
    key = tmp_path / "key"
    key.write_bytes(content)
    ran = run("check", "--endpoint", "http://x", "--api-key-file", str(key))
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert said in ran.err


def test_a_file_of_keys_is_read_as_the_server_reads_it(tmp_path) -> None:
    key = tmp_path / "keys"
    key.write_bytes(b"\xef\xbb\xbf# ours\r\n\r\nfirst\r\nsecond\r\n")
    assert read_key(str(key)) == "first"
    assert ServeConfig(api_key_file=str(key)).keys() == (b"first", b"second")
