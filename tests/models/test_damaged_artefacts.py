"""A trained drafter whose config or ids were edited is refused in one sentence: no wrong id reaches a kernel."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from outrider.errors import ModelError
from outrider.models.heads import files
from outrider.models.heads.block import BlockHead
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.heads.exit import ExitNorm
from outrider.models.heads.medusa import MedusaHeads
from outrider.models.heads.small import TrimmedModel
from tests import artefacts
from tests.models.tiny import make_module, make_target

HEADS = {
    "eagle3": Eagle3Head,
    "block": BlockHead,
    "medusa": MedusaHeads,
    "small_model": TrimmedModel,
    "early_exit": ExitNorm,
}
WITH_IDS = [kind for kind in HEADS if kind != "early_exit"]


@pytest.fixture(scope="module")
def target():
    return make_target(make_module("llama"))


def refused(kind, target, tensors=None, **config) -> str:
    made = artefacts.make(kind, target)
    changed = files.Artefact({**copy.deepcopy(dict(made.config)), **config}, {**made.tensors, **(tensors or {})})
    with pytest.raises(ModelError) as caught:
        HEADS[kind](changed, target)
    assert "again" in str(caught.value) or "outrider train" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", HEADS)
def test_a_whole_one_is_taken(kind, target):
    HEADS[kind](artefacts.make(kind, target), target)


@pytest.mark.parametrize("kind", WITH_IDS)
@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda ids: ids.flip(0), "kept_ids"),
        (lambda ids: torch.cat([ids[:1], ids[:-1]]), "kept_ids"),
        (lambda ids: torch.cat([torch.tensor([-1]), ids[1:]]), "kept_ids"),
        (lambda ids: torch.cat([ids[:-1], torch.tensor([10**6])]), "1000000, which is beyond"),
        (lambda ids: ids[:0], "kept_ids"),
        (lambda ids: ids[None], "kept_ids"),
        (lambda ids: ids + 0.5, "kept_ids"),
    ],
)
def test_kept_ids_are_ids_of_the_target_in_order(kind, edit, part, target):
    ids = artefacts.make(kind, target).tensors["kept_ids"]
    assert part in refused(kind, target, {"kept_ids": edit(ids)})


@pytest.mark.parametrize("kind", ["eagle3", "block", "medusa"])
@pytest.mark.parametrize("taps", [[99], [-1], ["a"], "x", None, [1.5], [], {"0": 1}])
def test_taps_are_layers_of_the_target(kind, taps, target):
    assert "taps" in refused(kind, target, taps=taps)


@pytest.mark.parametrize(
    ("kind", "name"), [("small_model", "num_buckets"), ("early_exit", "exit_layers"), ("block", "block_size")]
)
@pytest.mark.parametrize("value", [0, -1, "x", 1.5])
def test_sizes_are_at_least_one(kind, name, value, target):
    assert name in refused(kind, target, **{name: value})


@pytest.mark.parametrize("llama", [3, {}, {"hidden_size": "x"}, {"num_attention_heads": 7, "hidden_size": 16}])
def test_the_small_models_sizes_are_those_of_a_llama(llama, target):
    assert "Llama" in refused("small_model", target, llama=llama)


def test_medusa_has_taps_and_some_rates(target):
    assert "tap_norms" in refused("medusa", target, taps=[0])
    assert "rates" in refused("medusa", target, {"rates": torch.zeros(0, 8)})


@pytest.mark.parametrize("text", ["[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none_is_a_damaged_drafter(text, target, tmp_path):
    folder = artefacts.write(tmp_path / "a", "early_exit", target)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="damaged or missing"):
        files.read(folder)


@pytest.mark.parametrize("described", [None, 3, "llama"])
def test_a_drafter_that_does_not_name_its_target_is_none(described, target, tmp_path):
    folder = artefacts.write(tmp_path / "a", "early_exit", target)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "target": described}))
    assert files.trained(str(folder)) is None
    with pytest.raises(ModelError, match="holds no trained drafter"):
        files.read(folder)
