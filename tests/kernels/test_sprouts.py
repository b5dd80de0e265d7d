"""Sprouting: Triton's kernel against its twin, and the twin against the host's own weights of the same candidates."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.drafters.device import FITS
from outrider.drafters.weights import noisy_chance
from outrider.kernels.places import NOTHING
from outrider.kernels.sprouts import Frontier, Ranked, Sprouts
from tests.kernels.conftest import make as make_kernels

COLUMNS = 40


def a_level(seed: int, size: int, num: int, width: int, depth: int, columns: int = COLUMNS):
    """Rows of random logits, some of which have no law, below random nodes, some of which are none."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size * num, columns, generator=generator) * 3
    if columns == COLUMNS:
        logits[0, 3] = torch.nan
        logits[-1, 5:] = -torch.inf
    heat = torch.tensor([0.0, 1.0, 0.6][:size])
    rows = torch.arange(size * num, dtype=torch.int32)
    keys = heat.repeat_interleave(num), rows.long() * 7, rows, rows + 1
    tokens = torch.randint(0, 90, (size, num), generator=generator)
    tokens[-1, -1] = NOTHING if num > 1 else 5
    above = Frontier(
        tokens,
        torch.rand(size, num, generator=generator),
        torch.randint(0, 99, (size, num, depth), generator=generator),
        torch.arange(size * num),
        torch.zeros(size, num, dtype=torch.int64),
    )
    trust = torch.rand(size * num, generator=generator) if seed % 2 else None
    ranked = Ranked(logits, *make_kernels("plain").rank(logits, width + 1, *keys), trust)
    return ranked, above, heat, torch.arange(columns) * 2 + 1 if seed % 3 else None


@pytest.mark.parametrize("shape", [(1, 1, 2, 0), (3, 1, 4, 0), (3, 4, 4, 2), (2, 3, 1, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_triton_sprouts_as_its_twin_does(shape, seed):
    size, num, width, depth = shape
    ranked, above, heat, kept = a_level(seed, size, num, width, depth)
    plain, found = (make_kernels(name).sprout(ranked, above, width, heat, FITS, kept) for name in ("plain", "triton"))
    assert torch.equal(plain.tokens, found.tokens)
    torch.testing.assert_close(found.weights, plain.weights)
    torch.testing.assert_close(found.best.weights, plain.best.weights)
    for part in ("tokens", "paths", "origins", "chosen"):
        left, right = getattr(plain.best, part), getattr(found.best, part)
        assert left.dtype == right.dtype
        assert torch.equal(left, right), part


def test_a_vocabulary_of_two_words_has_no_third_child():
    for name in ("plain", "triton"):
        ranked, above, heat, _ = a_level(2, 2, 1, 3, 0, columns=2)
        found = make_kernels(name).sprout(ranked, above, 3, heat, FITS)
        assert found.tokens[:, 2].tolist() == [NOTHING, NOTHING]
        assert found.weights[:, 2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chances_are_those_that_the_host_starts_from(temperature):
    kernels = make_kernels("plain")
    logits = torch.randn(1, COLUMNS, generator=torch.Generator().manual_seed(4)) * 2
    one = torch.ones(1, dtype=torch.int32)
    heat = torch.tensor([temperature])
    scores, columns, masses = kernels.rank(logits, 4, heat, one.long(), one, one)
    above = Frontier.of_roots(1, logits.device)
    found: Sprouts = kernels.sprout(Ranked(logits, scores, columns, masses), above, 3, heat, FITS)
    logs = torch.log_softmax(logits[0].double(), 0)[columns[0]].tolist()
    perturbed = scores[0].tolist()
    gaps = [perturbed[0] - perturbed[1], *(perturbed[0] - score for score in perturbed[1:])]
    expected = [
        noisy_chance(gap, log, rank) if temperature else math.exp(log)
        for rank, (gap, log) in enumerate(zip(gaps, logs, strict=True))
    ]
    assert found.weights[0].tolist() == pytest.approx(expected[:3], rel=1e-5)
    assert found.tokens[0].tolist() == columns[0, :3].tolist()
