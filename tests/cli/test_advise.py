"""`advise`: what it prints and gives as JSON, with stand-ins for engines whose speed is set by a clock."""

from __future__ import annotations

import json

import pytest

from outrider.measure import advice
from tests.cli.fakes import FakeLLM

LOSER = ("advise", "--target", "m", "--drafter", "lookahead", "--limit", "1")


@pytest.fixture
def paced(engines, monkeypatch):
    """Engines that take seconds by their drafter."""
    now = [0.0]
    seconds = {"none": 1.0, "ngram": 0.5, "suffix": 0.9, "lookahead": 2.0}
    real = FakeLLM.generate

    def generate(self, prompts, params=None, raw=False):
        now[0] += seconds[self.drafter]
        return real(self, prompts, params, raw)

    monkeypatch.setattr(FakeLLM, "generate", generate)
    whole = advice.race_all
    monkeypatch.setattr(advice, "race_all", lambda *a, **k: whole(*a, **{**k, "clock": lambda: now[0]}))
    return engines


def test_the_winner_and_what_to_tell_other_engines(run, paced) -> None:
    words = ("advise", "--target", "m", "--drafter", "lookahead,suffix,ngram", "--depth", "3", "--limit", "3")
    ran = run(*words, "--concurrency", "2", "--concurrency", "1", "--max-tokens", "40")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == "1 at once, temperature 0: ngram, 2.00x plain decoding (2.00 to 2.00)"
    assert "Run: outrider serve m --drafter ngram --depth 3" in lines
    assert any(line.startswith("vLLM: --speculative-config '{") for line in lines)
    assert "SGLang: --speculative-algorithm NGRAM --speculative-num-draft-tokens 3" in lines
    assert "outrider train" in ran.out
    assert "Raced on 3 of your prompts only" in ran.out
    assert all(engine.closed for engine in paced)


def test_leave_it_off_is_an_answer(run, paced) -> None:
    ran = run(*LOSER, "--json")
    data = json.loads(ran.out)
    assert (ran.code, data["run"], data["decided"], data["flags"]["vllm"]) == (0, None, True, "leave it off")
    assert data["loads"] == [{"concurrency": 1, "temperature": 0.0, "run": None, "ties": []}]
    assert data["flags"]["outrider"] == "outrider serve m --drafter none"
    assert data["races"][0]["high"] < 1
    assert data["races"][0]["stopped"] == "it had lost"
    said = run(*LOSER).out
    assert "leave it off; lookahead, the best, is at 0.50x" in said
    assert "Raced on 1 of your prompts only" in said


@pytest.mark.usefixtures("paced")
def test_too_little_time_is_no_answer(run) -> None:
    ran = run(*LOSER, "--budget", "1")
    assert ran.code == 0
    assert "Not decided within the time: lookahead; raise --budget" in ran.out
    ran = run("advise", "--target", "m", "--drafter", "lookahead,suffix", "--limit", "6", "--budget", "17")
    assert "temperature 0: none surely pays so far; lookahead, the best" in ran.out
    assert "Not decided within the time: suffix" in ran.out
    assert "outrider serve" not in ran.out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["advise"], "--target"),
        (["advise", "--target", "m", "--drafter", "none"], "'none' is no candidate"),
        (["advise", "--target", "m", "--drafter", "auto,ngram"], "'auto' is no candidate"),
        (["advise", "--target", "m", "--drafter", "ngram,"], "'' is no candidate, name drafters joined by commas"),
        (["advise", "--target", "m", "--drafter", "ngram+ngram"], "two different ones"),
        (["advise", "--target", "m", "--drafter", "ngram", "--depth", "0"], "depth=0 guesses nothing"),
        (["advise", "--target", "m", "--drafter", "eagle3", "--drafter-model", "w"], "'w' is for small_model"),
        (["advise", "--target", "m", "--budget", "nan"], "--budget"),
        (["advise", "--target", "m", "--drafter", "ngram,best"], "unknown drafter 'best'"),
    ],
)
@pytest.mark.usefixtures("engines")
def test_mistakes_are_one_sentence(run, words, part) -> None:
    ran = run(*words)
    assert (ran.code, ran.out) == (2, "")
    assert part in ran.err
