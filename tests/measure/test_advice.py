"""The race: who wins, who stops when, that plain decoding can win, and that time is kept to."""

from __future__ import annotations

import itertools
import json
import math
import random
from types import SimpleNamespace

import pytest

from outrider.errors import CapacityError, ConfigError
from outrider.measure.advice import LEAST_BLOCKS, MOST_BLOCKS, Load, Race, elsewhere, race_all
from outrider.measure.prompts import Prompt
from outrider.record import Tally
from outrider.registry import ELSEWHERE

PROMPTS = [Prompt(f"p{i}", f"p{i}") for i in range(6)]
SOLO, CROWD = Load(1, 0.0), Load(8, 0.0)


class Clock:
    """Moves only where an engine answers."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def race(speeds, loads=(SOLO,), budget=1e6, noise=0.03, error=None, cycles=8, **settings):
    """Race engines that take `1 / speed` seconds a prompt; a speed may be a function of the number at once."""
    clock, rng, asked = Clock(), random.Random(1), []

    class Engine:
        def __init__(self, drafter):
            if drafter == "too large":
                raise CapacityError("it does not fit: lower memory_share")
            self.drafter = drafter

        def generate(self, contents, params, raw=False):
            asked.append((self.drafter, tuple(contents), tuple(p.seed for p in params)))
            speed = 1.0 if self.drafter == "none" else speeds[self.drafter]
            speed = speed(len(contents)) if callable(speed) else speed
            clock.now += len(contents) / speed * math.exp(rng.gauss(0, noise))
            tally = Tally()
            for _ in range(cycles):
                tally.count(drafted=4, delivered=3)
            return [SimpleNamespace(error=error, tally=tally, completion_tokens=40) for _ in contents]

        def close(self):
            pass

    advice = race_all(
        lambda given: Engine(given["drafter"]),
        list(speeds),
        PROMPTS,
        loads,
        max_tokens=64,
        budget=budget,
        clock=clock,
        **settings,
    )
    return advice, asked, clock.now


def test_the_fastest_wins_and_losers_stop_early() -> None:
    advice, _, _ = race({"good": 1.5, "better": 2.0, "slow": 0.7, "so so": 1.2}, noise=0.1)
    assert advice.winner(SOLO).drafter == advice.overall() == "better"
    assert [race.drafter for race in advice.under(SOLO)] == ["better", "good", "so so", "slow"]
    blocks = {race.drafter: (len(race.logs), race.why) for race in advice.races}
    assert blocks["slow"] == (LEAST_BLOCKS, "it had lost")
    assert blocks["so so"] == (LEAST_BLOCKS, "it had lost")
    assert blocks["better"][0] > LEAST_BLOCKS
    found = advice.winner(SOLO).interval()
    assert found.low < found.ratio < found.high
    assert found.low < 2.0 < found.high
    assert advice.ties(SOLO) == []


def test_both_sides_answer_the_same_prompts_with_the_same_seeds_and_take_turns() -> None:
    _, asked, _ = race({"x": 1.3}, [Load(2, 1.0)])
    plain, other = ([ask[1:] for ask in asked if ask[0] == name] for name in ("none", "x"))
    assert plain == other
    assert plain[0] == (("p0", "p1"), (0, 1))
    assert plain[3] == (("p0", "p1"), (6, 7))
    firsts = [asked[i][0] for i in range(0, len(asked), 2)]
    assert {a for a, _ in itertools.groupby(firsts)} == {"none", "x"}


@pytest.mark.parametrize("speed", [0.9, 1.0, 1.01])
def test_what_does_not_surely_pay_is_left_off(speed) -> None:
    advice, _, _ = race({"x": speed})
    assert advice.winner(SOLO) is None
    assert advice.overall() is None


def test_two_that_are_alike_are_a_tie() -> None:
    advice, _, _ = race({"x": 1.5, "y": 1.5}, noise=0.06)
    assert len(advice.ties(SOLO)) == 1


def test_loads_have_answers_of_their_own_and_one_that_loses_somewhere_is_not_for_all() -> None:
    fading = {"x": lambda many: 2.0 if many == 1 else 0.8, "y": lambda many: 1.3 if many == 1 else 1.1}
    advice, _, _ = race(fading, (SOLO, CROWD))
    assert (advice.winner(SOLO).drafter, advice.winner(CROWD).drafter, advice.overall()) == ("x", "y", "y")


def test_time_is_kept_to_and_what_is_left_goes_to_those_behind() -> None:
    advice, _, seconds = race({"x": 1.5, "y": 1.5}, budget=60.0, noise=0.3)
    assert seconds < 75
    assert {race.why for race in advice.races} <= {"its time was over", "it had lost"}
    advice, _, _ = race({"x": 1.5}, budget=1.0)
    assert (advice.winner(SOLO), advice.under(SOLO), len(advice.races[0].logs)) == (None, [], 1)
    advice, _, _ = race({"x": 1.5}, noise=2.0)
    assert len(advice.races[0].logs) == MOST_BLOCKS


def test_too_little_time_decides_the_first_and_says_who_was_not_raced() -> None:
    advice, _, seconds = race({"x": 1.5, "y": 1.5, "z": 1.5}, budget=12.0, noise=0.01)
    assert (advice.winner(SOLO).drafter, advice.overall()) == ("x", "x")
    assert (advice.undecided, advice.is_decided) == (["y", "z"], False)
    assert [len(each.logs) for each in advice.races] == [LEAST_BLOCKS, 1, 0]
    assert seconds < 20


def test_one_that_does_not_fit_is_told_of_and_a_failure_is_no_number() -> None:
    advice, _, _ = race({"too large": 2.0, "x": 1.5})
    assert advice.errors == {"too large": "it does not fit: lower memory_share"}
    assert advice.overall() == "x"
    with pytest.raises(ConfigError, match="a prompt failed: no"):
        race({"x": 1.5}, error="no")
    with pytest.raises(ConfigError, match="at least one drafter"):
        race({})


def test_limits_by_hand() -> None:
    tally = Tally()
    for delivered in (1, 1, 1, 2):
        tally.count(drafted=4, delivered=delivered)
    tally.seconds_draft, tally.seconds_verify, tally.seconds_sample = 4.0, 5.0, 1.0
    said = " ".join(Race("x", SOLO, [0.1], tally, texts=2, tokens=20).limits())
    assert "kept in 25 %" in said or "kept in 25%" in said
    assert "40%" in said
    assert "10 tokens" in said
    assert Race("x", SOLO, tally=Tally()).limits() == []
    assert json.loads(json.dumps(Race("x", SOLO).to_json()))["ratio"] is None


def test_flags_of_other_engines() -> None:
    vllm, sglang = elsewhere(ELSEWHERE["ngram"], 5, None)
    config = json.loads(vllm.removeprefix("--speculative-config ").strip("'"))
    assert config == {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": 5}
    assert sglang == "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5"
    vllm, sglang = elsewhere(ELSEWHERE["small_model"], 3, "org/small")
    assert '"model": "org/small"' in vllm
    assert sglang.endswith("--speculative-draft-model-path org/small")
    assert elsewhere(ELSEWHERE["suffix"], 3, None)[1] == "no equal"
    assert elsewhere(None, 3, None)[0].startswith("no equal")
