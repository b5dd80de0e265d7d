"""Fault 8: every sampling field is read on every path, plain and guessed, under both rules, or belongs elsewhere."""

import math
from dataclasses import fields

import pytest
import torch

from outrider.request import SamplingParams
from outrider.sampling.automaton import TokenAutomaton
from outrider.sampling.context import Context
from outrider.sampling.verify import verify
from outrider.tree import DraftTree
from tests.laws import DrawKernels, make

# By field: a value that forbids the probe's favourite, token 0, after what has been said; None: a truncation.
READ_HERE = {
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "temperature": None,
    "repetition_penalty": 1e6,
    "frequency_penalty": 50.0,
    "presence_penalty": 50.0,
    "logit_bias": {0: -math.inf},
    "bad_words": ((1, 0),),
    "min_tokens": 9,
    "automaton": TokenAutomaton(0, {0: {0: 1}, 1: {1: 2}, 2: {1: 2, 2: 2}}),
}
FORBIDDING = [name for name, value in READ_HERE.items() if value is not None]
SAID = dict.fromkeys(("logit_bias", "min_tokens"), (2, 1))  # they forbid token 0 from the start
# By field: who reads it. `logprobs*` have their own module here; the rest never touches a law.
READ_ELSEWHERE = {
    "max_tokens": "scheduler",
    "stop": "ends",
    "stop_token_ids": "ends, and min_tokens through Request.end_ids",
    "ignore_eos": "Request.end_ids",
    "seed": "Request.seed",
    "n": "Request.sample",
    "logprobs": "logprobs",
    "logprobs_mode": "logprobs",
    "prompt_logprobs": "logprobs",
    "speculation": "engine",
    "depth": "engine",
    "width": "engine",
    "trace": "engine",
}
NUM_GUESSED = {"plain": 0, "root and node": 1, "nodes alone": 2}


def draws(row, said, num_guessed, acceptance, num_draws, **params):
    """Tokens drawn from the logits `row` after the completion `said`, whose last tokens are guesses of this cycle."""
    tree, tokens = DraftTree.chain(said[2 - num_guessed :]), []
    sure = torch.full((num_guessed, 4), -1000.0)
    for i, token in enumerate(tree.tokens):
        sure[i, token] = 1000.0
    for sample in range(num_draws):
        ends = (0,) if "min_tokens" in params else ()
        request = make(prompt=(3,), seed=11, sample=sample, end_ids=ends, **params)
        request.output += said[: 2 - num_guessed]
        logits = torch.cat([sure, torch.tensor([row])])
        (verdict,) = verify([tree], logits, [Context(request, 4)], DrawKernels(), acceptance)
        assert len(verdict.path) == num_guessed
        tokens.append(verdict.tokens[-1])
    return tokens


def test_every_field_has_its_reader():
    assert set(READ_HERE) | set(READ_ELSEWHERE) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("num_guessed", NUM_GUESSED.values(), ids=NUM_GUESSED)
class TestEveryPath:
    @pytest.mark.parametrize("params", [{}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}, {"temperature": 0.01}])
    def test_truncations_leave_only_the_favourite(self, num_guessed, acceptance, params):
        drawn = draws([2.0, 1.0, 0.5, -20.0], (0, 1), num_guessed, acceptance, 60, **{"temperature": 1.0, **params})
        assert set(drawn) == ({0} if params else {0, 1, 2})

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("field", FORBIDDING)
    def test_the_favourite_is_forbidden(self, num_guessed, acceptance, field, temperature):
        row, said = [60.0, -500.0, 50.0, -500.0], SAID.get(field, (0, 1))
        drawn = draws(row, said, num_guessed, acceptance, 20, temperature=temperature, **{field: READ_HERE[field]})
        assert set(drawn) == {2}
        assert set(draws(row, said, num_guessed, acceptance, 20, temperature=temperature)) == {0}
