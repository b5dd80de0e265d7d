"""Heads of others guess here what their published code says; those of another target, or another form, are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.heads import files, foreign
from outrider.models.heads.widen import open_artefact
from tests import foreign_heads as theirs
from tests.drafters import test_heads as served


class World:
    """The tiny target as their code sees it."""

    def __init__(self) -> None:
        self.module = served.module()
        self.embedding = self.module.get_input_embeddings().weight.detach()
        self.head = self.module.lm_head.weight.detach()
        self._oracle = served.Oracle(None)  # type: ignore[arg-type]

    def law(self, drafter: str, folder: Path, known: list[int], path: list[int], blind: range) -> Tensor:
        """What their code says after the known tokens and a path of guesses: (V,) float64."""
        config, tensors = weights(folder)
        states = self._oracle._states(known)
        if drafter == "eagle3":
            return theirs.eagle3(config, tensors, self.embedding, known, states, path, blind)
        if drafter == "block":
            return theirs.dflash(config, tensors, self.embedding, self.head, known, states, len(path), blind)
        with torch.no_grad():
            last = self.module.model.norm(states[-1][len(known) - 2])
        return theirs.medusa(config, tensors, self.head, last, len(path))


def weights(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = theirs.read(folder)
    loose = folder / "medusa_lm_head.pt"
    return config, tensors or torch.load(loose, weights_only=True)


@pytest.mark.parametrize("layout", theirs.LAYOUTS)
def test_a_head_of_others_says_what_their_code_says(layout, tmp_path, monkeypatch):
    """In chunks beside decoding rows, along accepted paths, and behind cached prefixes."""
    drafter, world, made = theirs.LAYOUTS[layout][0], World(), served.target("native", monkeypatch)
    folder = theirs.make(layout, world.module.config, tmp_path / "head")
    engine = served.build(drafter, made, folder, max_rows=7)
    watched = served.Watched(engine.drafter)
    prompts = served.texts(3)
    cold = served.serve(engine, prompts)
    served.serve(engine, [[*prompts[0], *cold[0].output[:9]]], first=4)
    plain = served.serve(served.build(None, served.target("native", monkeypatch)), prompts)
    assert [request.output for request in cold] == [request.output for request in plain]
    head = engine.drafter.heads if drafter == "medusa" else engine.drafter.head
    compared, rng = 0, random.Random(1)
    for request, known, path, logits, _ in rng.sample(watched.laws, min(50, len(watched.laws))):
        expected = world.law(drafter, Path(folder), known, path, watched.blind[request.id])[: served.VOCAB]
        assert (expected > -torch.inf).nonzero()[:, 0].tolist() == head.kept_ids.tolist()
        torch.testing.assert_close(logits.double(), expected[head.kept_ids], atol=1e-4, rtol=1e-4)
        compared += bool(path)
    assert compared > 10


@pytest.mark.parametrize("layout", theirs.LAYOUTS)
def test_a_head_of_another_width_is_refused(layout, tmp_path, monkeypatch):
    drafter = theirs.LAYOUTS[layout][0]
    config = served.make_module("llama", vocab_size=served.VOCAB, hidden_size=48, num_hidden_layers=4).config
    folder = theirs.make(layout, config, tmp_path / "head")
    with pytest.raises(ModelError, match=r"trained for another target than tiny \(.*\): choose one of this target"):
        open_artefact(drafter, folder, served.target("lean", monkeypatch))


def changed(folder: str, **fields: Any) -> Path:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return Path(folder)


@pytest.mark.parametrize(
    ("layout", "fields", "sentence"),
    [
        ("eagle3 of its authors", {"vocab_size": 99}, None),
        ("eagle3 of its authors", {"num_hidden_layers": 2}, "has more than one layer"),
        ("eagle3 of its authors", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotated in a way"),
        (
            "eagle3 of speculators",
            {"eagle_aux_hidden_state_layer_ids": [1, 9]},
            "reads before layer 9, and there are 4",
        ),
        (
            "eagle3 with rows of its own",
            {"embed_requires_grad": False},
            "input rows that it brings are not this target's",
        ),
        ("dflash of speculators", {"sample_from_anchor": True}, "guesses from its anchor"),
        ("dflash of its authors", {"layer_types": ["sliding_attention"] * 2}, "sees a sliding window only"),
        (
            "dflash of speculators",
            {"speculators_model_type": "dspark"},
            "no drafter here reads heads of the kind 'dspark'",
        ),
        ("dflash of speculators", {"block_size": None}, "has not the config or the tensors of its layout"),
    ],
)
def test_what_is_not_served_is_refused_in_a_sentence(layout, fields, sentence, tmp_path, monkeypatch):
    made, drafter = served.target("lean", monkeypatch), theirs.LAYOUTS[layout][0]
    folder = changed(theirs.make(layout, served.module().config, tmp_path / "head"), **fields)
    if sentence is None:  # what t2d says counts, where there is one
        assert open_artefact(drafter, str(folder), made).drafter == drafter
        return
    with pytest.raises(ModelError, match=sentence):
        open_artefact(drafter, str(folder), made)


def test_a_head_for_another_architecture_is_refused(tmp_path, monkeypatch):
    made = served.target("lean", monkeypatch)
    folder = Path(theirs.make("eagle3 of speculators", served.module().config, tmp_path / "head"))
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["architectures"] = ["Qwen3ForCausalLM"]
    made.config.architectures = ["LlamaForCausalLM"]
    changed(str(folder), **config)
    with pytest.raises(ModelError, match="it is a head for Qwen3ForCausalLM, this is LlamaForCausalLM"):
        open_artefact("eagle3", str(folder), made)


def test_a_head_is_known_by_its_layout_and_not_read_without_its_target(tmp_path):
    config = served.module().config
    for layout, (drafter, _) in theirs.LAYOUTS.items():
        folder = Path(theirs.make(layout, config, tmp_path / layout.replace(" ", "-")))
        assert files.trained(str(folder)) == folder
        assert files.kind(folder) == drafter
        assert foreign.is_foreign(folder)
        with pytest.raises(ModelError, match="read together with its target"):
            files.read(folder)


def test_torn_weights_are_refused(tmp_path, monkeypatch):
    made, config = served.target("lean", monkeypatch), served.module().config
    folder = Path(theirs.make("eagle3 of its authors", config, tmp_path / "torn"))
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="are damaged: fetch them again"):
        open_artefact("eagle3", str(folder), made)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights that can be read"):
        open_artefact("eagle3", str(folder), made)
    other = theirs.make("medusa of vllm", config, tmp_path / "other")
    with pytest.raises(ModelError, match="of the kind 'medusa': choose it"):
        open_artefact("eagle3", other, made)
