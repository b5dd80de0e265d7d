"""A target whose output head has a bias, as Phi's: what training scores is what is served."""

from __future__ import annotations

import pytest
import torch

from outrider.models.batch import BatchBuilder
from outrider.models.heads import files
from outrider.models.heads.exit import ExitNorm
from outrider.models.heads.medusa import MedusaHeads
from outrider.training.block import Block
from outrider.training.early_exit import EarlyExit
from outrider.training.medusa import Medusa
from tests.models.tiny import VOCAB, make_module, make_target
from tests.training.test_harvest import make_batch
from tests.training.test_heads import KEPT, watched


@pytest.fixture(scope="module")
def phi():
    module = make_module("phi")
    assert module.lm_head.bias.abs().max() > 0.1
    return module


def artefact(drafter: str, module, target) -> files.Artefact:
    config = {"format": files.FORMAT, "drafter": drafter, "target": files.describe_target(target), **module.settings()}
    return files.Artefact(config, module.tensors())


@torch.no_grad()
def test_an_exit_norm_is_served_as_it_is_trained(phi):
    module = EarlyExit.initialise(phi, torch.arange(VOCAB), exit_layers=2)
    _, (seen,) = watched(phi, module, kept=torch.arange(VOCAB))
    target = make_target(make_module("phi"))
    head, batch, served = ExitNorm(artefact("early_exit", module, target), target), make_batch(), []
    for tokens, length, reply in zip(batch.tokens, batch.lengths.tolist(), batch.replies.tolist(), strict=True):
        builder = BatchBuilder(16)
        builder.request(range(1, 8))
        builder.line(0, tokens[:length].tolist(), length)
        logits = head.logits(builder.build(target.device), target.make_pages(8 * 16))
        served.append(logits[reply - 1 : length - 1])
    torch.testing.assert_close(torch.cat(served), seen, rtol=2e-2, atol=2e-2)  # the artefact's norm is bfloat16


@torch.no_grad()
def test_medusas_heads_are_served_as_they_are_trained(phi):
    module = Medusa.initialise(phi, KEPT, num_heads=1)
    features, (seen,) = watched(phi, module)
    target, batch = make_target(make_module("phi")), make_batch()
    rows = batch.rows[batch.rows % batch.tokens.shape[1] > 0]
    taps = torch.cat([features.taps[tap].flatten(0, 1)[rows - 1] for tap in module.taps], dim=1)
    heads = MedusaHeads(artefact("medusa", module, target), target, "float32")
    served = heads.logits(taps, batch.tokens.flatten()[rows], 1)[:, 0]
    assert (served - seen[batch.rows % batch.tokens.shape[1] > 0]).norm() < 0.02 * seen.norm()


@torch.no_grad()
def test_a_block_that_says_nothing_itself_says_the_bias(phi):
    """Its rows are served by the same linear as the others'."""
    module = Block.initialise(phi, KEPT, block_size=2, num_anchors=2)
    _, (seen,) = watched(phi, module, silent=(module.adapter.weight, module.markov_in.weight))
    torch.testing.assert_close(seen, phi.lm_head.bias[KEPT].expand_as(seen))
