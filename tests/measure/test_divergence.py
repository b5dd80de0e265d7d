"""Divergence and perplexity against Transformers' logits and scipy's relative entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr

from outrider.errors import ConfigError
from outrider.measure.divergence import divergence, score
from tests.models.tiny import make_module, make_target

TEXTS = [[3, 9, 4, 11, 5, 7, 3, 3, 12], [6, 8], list(range(3, 23)) * 4]


@pytest.fixture(scope="module")
def pair():
    """A tiny model and the same with its head disturbed, as targets, each with Transformers' logits of every text."""
    made = []
    for noise in (0.0, 0.02):
        module = make_module("llama")
        with torch.no_grad():
            weight = module.lm_head.weight
            weight += noise * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            logits = [module(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in TEXTS]
        target = make_target(module)
        made.append((target, [x.double().numpy()[:, : target.vocab_size] for x in logits]))
    return made


def test_score_equals_transformers(pair):
    target, golden = pair[0]
    for ids, expected in zip(TEXTS, golden, strict=True):
        np.testing.assert_allclose(score(target, ids).numpy(), expected, atol=1e-4)


def test_divergence_equals_scipy(pair):
    (reference, reference_logits), (target, logits) = pair
    found = divergence(target, reference, TEXTS)
    kl, surprise, reference_surprise = [], [], []
    for ids, p_logits, q_logits in zip(TEXTS, reference_logits, logits, strict=True):
        p, q = log_softmax(p_logits, axis=-1), log_softmax(q_logits, axis=-1)
        kl.append(rel_entr(np.exp(p), np.exp(q)).sum(-1))
        surprise += [-q[i, token] for i, token in enumerate(ids[1:])]
        reference_surprise += [-p[i, token] for i, token in enumerate(ids[1:])]
    each = np.concatenate(kl)
    assert found.positions == len(each) == sum(map(len, TEXTS))
    assert each.mean() > 1e-4, "the disturbance must show"
    assert found.mean_kl == pytest.approx(each.mean(), rel=1e-2)
    assert found.max_kl == pytest.approx(each.max(), rel=1e-2)
    assert found.perplexity == pytest.approx(math.exp(np.mean(surprise)), rel=1e-4)
    assert found.reference_perplexity == pytest.approx(math.exp(np.mean(reference_surprise)), rel=1e-4)
    assert found.to_json()["perplexity_change"] == pytest.approx(found.perplexity / found.reference_perplexity - 1)


def test_a_target_does_not_diverge_from_itself(pair):
    target, _ = pair[0]
    found = divergence(target, target, TEXTS)
    assert (found.mean_kl, found.max_kl, found.perplexity_change) == (0.0, 0.0, 0.0)


def test_mistakes_are_refused(pair):
    target, _ = pair[0]
    with pytest.raises(ConfigError, match="two tokens"):
        divergence(target, target, [[3]])
    with pytest.raises(ConfigError, match="context holds"):
        divergence(target, target, [[3] * (target.max_positions + 1)])
