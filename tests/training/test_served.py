"""What training exports is what the engine serves: its tensors, written and read again, by the one specification."""

from __future__ import annotations

import pytest
import torch

from outrider.models.heads import files
from outrider.registry import TRAINED
from outrider.training.layers import Shape
from tests.drafters import test_heads as served
from tests.models.tiny import make_module, make_target

SIZES = {
    "small_model": {
        "hidden": 16,
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 8,
        "intermediate": 32,
        "num_buckets": 3,
    },
    "block": {"num_anchors": 4, "block_size": 4, "markov_rank": 4},
    "eagle3": {"unroll": 2},
    "medusa": {"num_heads": 4},
    "medusa, plain": {"num_heads": 4, "plain": 1},
    "early_exit": {"exit_layers": 2},
}


@pytest.mark.parametrize(
    "name", ["llama", "llama3_rope", "llama_dynamic", "phi", "phi3_longrope", "gpt_neox", "glm4", "gpt_oss"]
)
def test_positions_are_rotated_as_they_are_served(name):
    trained = Shape.of(make_module(name)).rotary_tables(make_module(name))
    for there, here in zip(trained, make_target(make_module(name)).model.rotary(), strict=True):
        assert len(there) > len(here)
        torch.testing.assert_close(there[: len(here)], here)


@pytest.mark.parametrize("form", [*TRAINED, "medusa, plain"])
def test_a_trained_module_is_served_as_it_is_specified(form, tmp_path, monkeypatch):
    name = form.partition(",")[0]
    made = served.target("lean", monkeypatch)
    kept = torch.tensor([token for token in range(served.VOCAB) if token % 5])
    kind = TRAINED[name]
    if kind.full_vocabulary:
        kept = torch.arange(served.VOCAB)
    module = kind.initialise(served.module(), kept, **SIZES.get(form, {}))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():  # far from where training begins, so that no part is silent
            size = 0.2 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * size)
        if name == "medusa":  # measured on held-out text at the end of a run
            module.rates.copy_(torch.linspace(0.5, 0.1, module.rates.shape[1]).expand_as(module.rates))
    config = {"drafter": name, "target": files.describe_target(made), **module.settings()}
    files.write(tmp_path / name, config, module.tensors(), {}, "")
    served.agrees(name, made, str(tmp_path / name))
