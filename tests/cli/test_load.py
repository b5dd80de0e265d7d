"""`outrider load`: one object or a table, and wrong options in one sentence."""

from __future__ import annotations

import json

import pytest

from tests.server.conftest import live, open_tiny
from tests.server.tiny_chat import save_tiny_chat


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with live(open_tiny(save_tiny_chat(tmp_path_factory.mktemp("load")))) as server:
        yield server


def test_the_verb_prints_one_object(served, run) -> None:
    ran = run("load", served.url, "--clients", "1", "--clients", "2", "--rate", "40", "--requests", "3", "--json",
              "--max-tokens", "5", "--body", '{"speculation": {"enabled": false}, "ignore_eos": true}')  # fmt: skip
    assert ran.code == 0, ran.err
    told = json.loads(ran.out.splitlines()[-1])
    assert [each["level"] for each in told["loads"]] == ["1 clients", "2 clients", "40 requests/s"]
    assert all(each["tau"] == 1.0 and each["failed"] == 0 for each in told["loads"])
    shown = run("load", served.url, "--clients", "1", "--requests", "1", "--max-tokens", "2")
    assert shown.code == 0
    assert "seconds at P50" in shown.out


def test_one_command_sweeps_with_speculation_and_without(served, run, tmp_path) -> None:
    ran = run("load", served.url, "--plain-too", "--requests", "4", "--max-tokens", "6", "--json", "--out",
              str(tmp_path), "--body", '{"ignore_eos": true}')  # fmt: skip
    assert ran.code == 0, ran.err
    report = json.loads(ran.out.splitlines()[-1])
    loads = report["loads"]
    assert [each["level"] for each in loads] == [f"{n} clients{way}" for n in (1, 4, 16, 64) for way in ("", ", plain")]
    assert [each["requests"] for each in loads] == [4, 4, 4, 4, 16, 16, 64, 64]
    for guessed, plain in zip(loads[::2], loads[1::2], strict=True):
        assert guessed["failed"] == plain["failed"] == 0
        assert guessed["tau"] > plain["tau"] == 1.0
        assert guessed["ratio"]["ratio"] > 0
        assert plain["ratio"] is None
        assert set(guessed["parts"]) == {"draft", "verify", "sample", "other"}
        for seconds in ("first_token", "between", "token"):
            assert list(guessed[seconds]) == list(plain[seconds]) == ["p50", "p95", "p99"]
    assert report["memory"]["target"] == served.llm.resolved.memory.target
    assert report["server"]["drafter"] == "ngram"
    assert report == json.loads((tmp_path / "load.json").read_text())
    text, page = (tmp_path / "load.md").read_text(), (tmp_path / "load.html").read_text()
    ratio = loads[6]["ratio"]
    assert f"| {ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) |" in text
    for heading in ("Throughput", "Latency", "Acceptance by position", "The server, as it tells of itself"):
        assert f"## {heading}\n" in text
        assert f"<h2>{heading}</h2>" in page
    assert page.count("<svg ") == page.count("<figcaption>") == 5


def test_a_load_without_an_answer_is_a_failure(served, run, tmp_path) -> None:
    ran = run("load", served.url, "--clients", "2", "--requests", "2", "--timeout", "0.000001", "--out", str(tmp_path))
    assert ran.code == 1
    assert "| 2 clients | no end within 1e-06 s | 2 |" in (tmp_path / "load.md").read_text()
    served.settle()


def test_wrong_options_are_refused(run) -> None:
    for words, said in (
        (["--rate", "0"], "rate is out of range"),
        (["--timeout", "0"], "timeout=0 is out of range"),
        (["--body", "{"], "no JSON"),
        (["--body", "[]"], "no JSON object"),
        (["--api-key-file", "nowhere"], "cannot be read"),
    ):
        ran = run("load", "http://127.0.0.1:9", *words)
        assert ran.code == 2
        assert said in ran.err
