"""Muon moves the matrices between states, AdamW everything that speaks of ids, and every weight is moved by one."""

from __future__ import annotations

import pytest
import torch

from outrider.registry import TRAINED
from outrider.training.base import build
from outrider.training.optimizers import optimizers
from outrider.training.settings import TrainConfig
from tests.training.test_loop import SIZES

KEPT = torch.arange(3, 50)


def made(drafter, target, kind):
    module = build(TRAINED[drafter], target, KEPT, dict(SIZES.get(drafter, {})), None)
    found = optimizers(module, TrainConfig(steps=1, optimizer=kind))
    return module, {
        type(one).__name__: [weight for group in one.param_groups for weight in group["params"]] for one in found
    }


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("drafter", TRAINED)
def test_every_weight_is_moved_by_one_optimiser(drafter, kind, taught):
    module, moved = made(drafter, taught, kind)
    ids = [id(weight) for weights in moved.values() for weight in weights]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(weight) for weight in module.parameters()}
    assert kind == "muon" or set(moved) == {"AdamW"}


@pytest.mark.parametrize("drafter", ["eagle3", "block", "medusa", "small_model"])
def test_muon_gets_the_matrices_between_states_alone(drafter, taught):
    module, moved = made(drafter, taught, "muon")
    names = {id(weight): name for name, weight in module.named_parameters()}
    muon = {names[id(weight)] for weight in moved["Muon"]}
    assert muon == {
        name
        for name, weight in module.named_parameters()
        if weight.dim() == 2
        and not any(word in name for word in ("embed", "head.weight", "norms", "markov_in", "markov_out"))
    }
