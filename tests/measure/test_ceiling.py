"""The bound by the target's own sureness, against exact enumeration of every way a reply can be cut into cycles."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest

from outrider.errors import ConfigError
from outrider.measure.ceiling import summarise, sureness
from outrider.measure.prompts import Prompt
from outrider.request import LogprobsMode, SamplingParams, TokenLogprob


def cycles_of(right, depth):
    """Cycles that a reply takes where `right[i]` says whether position i would be guessed."""
    place = cycles = 0
    while place < len(right):
        cycles += 1
        for _ in range(depth):
            if place < len(right) and right[place]:
                place += 1
            else:
                break
        place += 1  # the target's own token
    return cycles


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("chances", [[0.5], [0.9, 0.2, 0.7, 0.4, 0.6, 0.8], [1.0] * 6, [0.0] * 4])
def test_cycles_are_those_of_every_outcome_weighted_by_its_chance(chances, depth):
    expected = 0.0
    for right in product([False, True], repeat=len(chances)):
        weight = 1.0
        for chance, hit in zip(chances, right, strict=True):
            weight *= chance if hit else 1 - chance
        expected += weight * cycles_of(right, depth)
    found = summarise([[[chance] for chance in chances]], depth)
    assert found.tau[1] == pytest.approx(len(chances) / expected)


def test_masses_and_doubt_by_hand():
    found = summarise([[[0.4, 0.3, 0.2, 0.1], [0.9, 0.1]], [[0.5, 0.25, 0.125]]], depth=3)
    assert found.positions == 3
    assert found.mass == pytest.approx({1: 1.8 / 3, 2: (0.7 + 1 + 0.75) / 3, 4: (1 + 1 + 0.875) / 3})
    assert found.doubtful == pytest.approx(1 / 3)
    assert found.tau[1] < found.tau[2] < found.tau[4]


def test_nothing_said_is_refused():
    with pytest.raises(ConfigError, match="no token"):
        summarise([[]], 3)


class SaysChances:
    """Answers with one token whose law is (0.6, 0.4), and keeps what it was asked."""

    def generate(self, contents, params, raw):
        self.params = params
        law = ((3, math.log(0.6)), (1, math.log(0.4)))
        rows = (TokenLogprob(1, math.log(0.4), law),)
        return [SimpleNamespace(error=None, logprobs=rows) for _ in contents]


@pytest.mark.parametrize(("temperature", "mode"), [(0.0, LogprobsMode.RAW), (0.7, LogprobsMode.WARPED)])
def test_the_law_is_that_which_is_drawn_from_and_at_0_the_models_own(temperature, mode):
    llm = SaysChances()
    prompts = {"a": [Prompt("a:0", "x"), Prompt("a:1", "y")]}
    found = sureness(llm, prompts, SamplingParams(max_tokens=8, temperature=temperature, seed=1), 4, raw=True)["a"]
    assert (llm.params.logprobs, llm.params.logprobs_mode) == (4, mode)
    assert found.positions == 2
    assert found.mass == pytest.approx({1: 0.6, 2: 1.0, 4: 1.0})
