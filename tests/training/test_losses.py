"""Divergences against SciPy and NumPy in float64, whole and in chunks, with their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.special import logsumexp, rel_entr, softmax

from outrider.errors import ConfigError
from outrider.training.losses import Arithmetic, Law, divergence, summarise
from outrider.training.settings import LOSSES

VOCAB, KEPT = 12, np.array([0, 2, 3, 7, 8, 11])


def laws(seed: int = 0, rows: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Target logits (N, V) and draft logits (N, V_d), far from flat."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, VOCAB)) * 3, rng.normal(size=(rows, len(KEPT))) * 3


def expected(kind: str, target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    p = softmax(target, axis=-1)
    q = np.zeros_like(p)
    q[:, KEPT] = softmax(draft, axis=-1)
    kept = np.zeros_like(p)
    kept[:, KEPT] = p[:, KEPT] / p[:, KEPT].sum(axis=-1, keepdims=True)
    tv = np.abs(p - q).sum(axis=-1) / 2
    forward = rel_entr(kept, q).sum(axis=-1)
    weight = np.exp(-3 * (1 - tv))
    return {
        "forward_kl": forward,
        "reverse_kl": rel_entr(q, kept).sum(axis=-1),
        "jsd": np.array([jensenshannon(a, b) ** 2 for a, b in zip(p, q, strict=True)]),
        "tv": tv,
        "hybrid": weight * forward + (1 - weight) * tv,
    }[kind]


def law_of(target: np.ndarray) -> Law:
    logits = torch.from_numpy(target).float()
    kept, log_z, top = summarise(logits, torch.from_numpy(KEPT))
    places = torch.full((VOCAB,), -1)
    places[torch.from_numpy(KEPT)] = torch.arange(len(KEPT))
    return Law(kept, log_z, places[top])


@pytest.mark.parametrize("kind", LOSSES)
def test_values_equal_scipys(kind):
    target, draft = laws()
    law = law_of(target)
    loss, alpha = divergence(kind, torch.from_numpy(draft).float(), law.logits, law.log_z)
    np.testing.assert_allclose(loss.numpy(), expected(kind, target, draft), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(alpha.numpy(), 1 - expected("tv", target, draft), rtol=2e-5, atol=2e-6)


def test_the_law_is_summed_over_the_whole_vocabulary():
    target, _ = laws()
    np.testing.assert_allclose(law_of(target).log_z.numpy(), logsumexp(target, axis=-1), rtol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "hybrid"])
def test_gradients_equal_finite_differences(kind):
    target, draft = laws(1, rows=1)
    law = law_of(target)
    leaf = torch.from_numpy(draft).float().requires_grad_()
    divergence(kind, leaf, law.logits, law.log_z)[0].sum().backward()
    for place in range(len(KEPT)):
        step = np.zeros_like(draft)
        step[0, place] = 1e-6
        slope = (expected(kind, target, draft + step) - expected(kind, target, draft - step))[0] / 2e-6
        assert leaf.grad[0, place].item() == pytest.approx(slope, abs=2e-4)


def test_the_hybrids_weight_carries_no_gradient():
    target, draft = laws(2, rows=1)
    law = law_of(target)
    grads = {}
    for kind in ("hybrid", "forward_kl", "tv"):
        leaf = torch.from_numpy(draft).float().requires_grad_()
        loss, alpha = divergence(kind, leaf, law.logits, law.log_z)
        loss.sum().backward()
        grads[kind] = leaf.grad
    weight = torch.exp(-3 * alpha.detach())
    torch.testing.assert_close(grads["hybrid"], weight * grads["forward_kl"] + (1 - weight) * grads["tv"])


@pytest.mark.parametrize("chunk", [1, 4, 9, 64])
def test_chunks_change_nothing(chunk):
    target, draft = laws(3)
    law = law_of(target)
    states = torch.from_numpy(draft).float()
    head = torch.eye(len(KEPT), requires_grad=True)
    scores = Arithmetic("hybrid", chunk).score(lambda rows: rows @ head.T, (states,), law)
    scores.loss.sum().backward()
    grad = head.grad.clone()
    head.grad = None
    loss, alpha = divergence("hybrid", states @ head.T, law.logits, law.log_z)
    loss.sum().backward()
    torch.testing.assert_close(scores.loss, loss)
    torch.testing.assert_close(scores.alpha, alpha)
    torch.testing.assert_close(grad, head.grad)
    p = softmax(target, axis=-1)
    assert scores.hit.tolist() == (KEPT[draft.argmax(axis=-1)] == p.argmax(axis=-1)).tolist()


def test_a_law_without_mass_on_kept_ids_gives_numbers():
    """All mass outside: nothing can be accepted, and nothing becomes NaN."""
    target = np.full((1, VOCAB), -40.0)
    target[0, 1] = 40.0
    law = law_of(target)
    for kind in LOSSES:
        leaf = torch.zeros(1, len(KEPT), requires_grad=True)
        loss, alpha = divergence(kind, leaf, law.logits, law.log_z)
        loss.sum().backward()
        assert torch.isfinite(loss).all()
        assert torch.isfinite(leaf.grad).all()
        assert alpha.item() == pytest.approx(0, abs=1e-6)
    assert law.top.item() == -1


def test_an_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match="forward_kl"):
        Arithmetic("kl")
