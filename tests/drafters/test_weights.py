"""Evidence under noise: a lead counts, and so does the chance behind it; what became of guesses corrects both."""

from __future__ import annotations

import math
import random

import pytest
import torch

from outrider.drafters.candidates import Candidates, Place
from outrider.drafters.weights import Q_STEPS, Weights, noisy_chance
from outrider.kernels.plain import PlainKernels
from outrider.request import Request, SamplingParams
from outrider.sampling.context import Context
from tests import toy

GAPS = (0.0, 0.3, 1.0, 3.0, 8.0, math.inf)
LOGS = tuple(math.log(q) for q in (1e-6, 1e-3, 0.1, 0.5, 0.99))


def test_a_lead_and_a_likely_token_raise_the_leaders_chance() -> None:
    table = [[noisy_chance(gap, log_q, 0) for gap in GAPS] for log_q in LOGS]
    assert all(row == sorted(row) for row in table)
    assert all(list(column) == sorted(column) for column in zip(*table, strict=True))
    assert table[0][0] < 0.1
    assert table[-1][-1] > 0.95
    later = [noisy_chance(gap, LOGS[2], 1) for gap in GAPS]
    assert later == sorted(later, reverse=True)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_rare_token_that_leads_by_luck_weighs_less(temperature: float) -> None:
    """Two rows of one leader and one lead: in one it was likely before the noise, in the other the noise made it."""
    kernels = PlainKernels(torch.device("cpu"))
    request = Request(0, (1,), SamplingParams(temperature=temperature), seed=11)
    place = Place(Context(request, toy.VOCAB, torch.device("cpu")))
    noise = kernels.gumbel(*(k for k in _keys(request)), toy.VOCAB)[0]
    lead = 2.0
    weights = {}
    for name, token in (("rare", int(noise.argmax())), ("likely", int(noise.argmin()))):
        # Scores logit / T + g of -30 but for the leader, at 0, and a runner-up.
        scores = torch.full((toy.VOCAB,), -30.0, dtype=torch.float64)
        scores[token] = 0.0
        scores[(token + 1) % toy.VOCAB] = -lead
        logits = ((scores - noise) * temperature).float()[None]
        (found,) = Candidates(kernels, toy.VOCAB).best(logits, [place], 2)
        assert found[0].token == token
        weights[name] = found[0].weight
        q = torch.softmax(logits[0] / temperature, 0)[token].item()
        assert found[0].weight == pytest.approx(noisy_chance(lead, math.log(q), 0), rel=1e-3)
    assert weights["rare"] < weights["likely"]


def test_outcomes_correct_the_evidence() -> None:
    """A drafter better than the prior thinks is believed after some dozens of guesses, and so is a worse one."""
    rng = random.Random(2)
    for truth in (0.9, 0.05):
        weights = Weights(Q_STEPS)
        for _ in range(200):
            chance = noisy_chance(1.0, math.log(0.2), 0)
            weight, cell = weights.weigh(chance, chance, 0, 1)
            weights.learn(cell, chance, 0, rng.random() < truth)
        assert weight == pytest.approx(truth, abs=0.1)


def _keys(request: Request) -> tuple[torch.Tensor, ...]:
    context = Context(request, toy.VOCAB, torch.device("cpu"))
    return (
        torch.tensor([context.seed_bits], dtype=torch.int64),
        torch.tensor([request.sample], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
    )
