"""Log-probabilities against exact softmax; the same with speculation as without, to the last digit."""

import math
import random

import pytest
import torch

from outrider.errors import NumericsError
from outrider.request import LogprobsMode
from outrider.sampling import logprobs
from outrider.sampling.context import Context
from outrider.sampling.verify import verify
from outrider.tree import DraftTree
from tests.laws import DrawKernels, ToyModel, make, random_tree


def test_values_are_log_softmax_in_float64():
    logits = torch.randn(1000) * 5
    got = logprobs.of_token(logits, 1.0, 17, 6)
    exact = torch.log_softmax(logits.double(), 0)
    best = torch.sort(exact, descending=True)
    assert got.logprob == pytest.approx(float(exact[17]), abs=1e-11)
    assert [token for token, _ in got.top] == best.indices[:6].tolist()
    assert [value for _, value in got.top] == pytest.approx(best.values[:6].tolist(), abs=1e-11)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("vocab_size", [1, 3, 50, 20_000])
def test_probabilities_never_sum_above_1(scale, vocab_size):
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale
    for num_top in (1, 5, vocab_size):
        top = logprobs.of_token(logits, 1.0, 0, num_top).top
        assert sum(math.exp(value) for _, value in top) <= 1
        assert all(value < 0 for _, value in top)


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(5000)
    logits[[4000, 30]] = 1.0
    assert [token for token, _ in logprobs.of_token(logits, 1.0, 0, 5).top] == [30, 4000, 0, 1, 2]


def test_impossible_tokens_are_no_alternatives():
    got = logprobs.of_token(torch.tensor([0.0, -torch.inf, 0.0]), 1.0, 1, 3)
    assert [token for token, _ in got.top] == [0, 2]
    assert got.logprob == -math.inf


def test_prompt_rows_are_each_as_if_alone():
    logits, tokens = torch.randn(9, 3000), list(range(9))
    together = logprobs.of_prompt(logits, tokens, 4)
    assert together == [logprobs.of_prompt(logits[i : i + 1], [i], 4)[0] for i in range(9)]
    with pytest.raises(NumericsError):
        logprobs.of_prompt(torch.full((1, 3), torch.nan), [0], 1)


@pytest.mark.parametrize("mode", list(LogprobsMode))
@pytest.mark.parametrize("num_top", [0, 3])
def test_equal_with_and_without_speculation(mode, num_top):
    """Fault 23."""
    model, rng = ToyModel(9), random.Random(2)
    params = {"temperature": 0.8, "top_k": 5, "frequency_penalty": 1.0, "logprobs": num_top, "logprobs_mode": mode}

    def decode(guess):
        request, rows = make(seed=6, **params), []
        context = Context(request, 9)
        while len(request.output) < 20:
            tree = guess()
            logits = model.rows((*request.prompt, *request.output), tree)
            (verdict,) = verify([tree], logits, [context], DrawKernels())
            num = min(len(verdict.tokens), 20 - len(request.output))
            rows += logprobs.of_verdict(context, tree, verdict, logits, num)
            request.output += verdict.tokens[:num]
        return request, rows

    (plain, plain_rows), (guessed, guessed_rows) = decode(DraftTree), decode(lambda: random_tree(rng, 9, 40))
    assert guessed.output == plain.output
    assert guessed_rows == plain_rows
    assert [row.token for row in plain_rows] == plain.output
    sequence = [*plain.prompt, *plain.output]
    for i, row in enumerate(plain_rows):
        assert len(row.top) == num_top
        if mode is LogprobsMode.RAW:
            exact = torch.log_softmax(model.logits(tuple(sequence[: i + 2])).double(), 0)
            assert row.logprob == pytest.approx(float(exact[row.token]), abs=1e-11)
        else:
            assert row.logprob > -math.inf


def test_the_warped_law_of_a_greedy_request_is_certain():
    context = Context(make(logprobs=3, logprobs_mode=LogprobsMode.WARPED), 4)
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    (verdict,) = verify([DraftTree()], logits, [context], DrawKernels())
    (row,) = logprobs.of_verdict(context, DraftTree(), verdict, logits, 1)
    assert row.token == 1
    assert row.logprob == pytest.approx(0, abs=1e-11)
    assert [token for token, _ in row.top] == [1]
