"""A drafter that is not what training wrote, or meets another target, is never silently weak (fault 34)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import outrider
from outrider.config import EngineConfig
from outrider.drafters.base import Workshop
from outrider.engine.drafter_probe import doubts_of
from outrider.errors import ModelError
from outrider.models.heads import files, wiring
from outrider.registry import DRAFTERS
from tests import artefacts
from tests.models.tiny import make_module, make_target, make_tokenizer

THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 12000.0}}


def targeted(dtype: torch.dtype = torch.float32, **settings):
    """A tiny target that reads a text as ids of all its characters."""
    tokenizer = make_tokenizer()
    tokenizer.encode = lambda text, add_special_tokens: [ord(sign) for sign in text]
    return make_target(make_module("llama", dtype, **settings), tokenizer)


@pytest.fixture(scope="module")
def target():
    return targeted()


def _write(folder: Path, made: files.Artefact, described) -> Path:
    files.write(folder, {**made.config, "target": described}, made.tensors, {}, "")
    return folder


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("eagle3", {"taps": [0, 1, 1]}),
        ("block", {"taps": [0, 0, 1, 1, 2]}),
        ("block", {"block_size": 3}),
        ("medusa", {"taps": [1]}),
        ("small_model", {"num_buckets": 3}),
        ("early_exit", {"exit_layers": 2}),
    ],
)
def test_an_edited_field_is_found_out(kind, changes, target, tmp_path):
    folder = artefacts.write(tmp_path / "a", kind, target)
    files.read(folder)
    edit(folder, **changes)
    with pytest.raises(ModelError, match=r"not as it was written.*train the drafter again"):
        files.read(folder)


@pytest.mark.parametrize("kind", artefacts.KINDS)
def test_weights_of_another_drafter_of_these_sizes_are_found_out(kind, target, tmp_path):
    folder = artefacts.write(tmp_path / "a", kind, target)
    other = artefacts.make(kind, target, seed=1).tensors
    same_ids = {name: files.read(folder).tensors[name] for name in other if name == "kept_ids"}
    files.write(tmp_path / "b", artefacts.make(kind, target).config, {**other, **same_ids}, {}, "")
    (tmp_path / "b" / "model.safetensors").replace(folder / "model.safetensors")
    with pytest.raises(ModelError, match="not as it was written"):
        files.read(folder)


def test_one_of_an_earlier_version_is_read_and_sealed_when_it_is_written_anew(target, tmp_path):
    folder = artefacts.write(tmp_path / "a", "eagle3", target)
    config = json.loads((folder / "config.json").read_text())
    del config["seal"]
    (folder / "config.json").write_text(json.dumps(config))
    read = files.read(folder)
    assert wiring.doubts("eagle3", read.config["target"], target) is None
    files.write(folder, read.config, read.tensors, {}, "")
    assert "seal" in json.loads((folder / "config.json").read_text())
    files.read(folder)


def test_its_own_target_raises_no_doubt_in_any_float_type(target):
    described = wiring.signature(target)
    assert len(described["says"].split()) == 64
    assert wiring.doubts("eagle3", described, target) == []
    assert wiring.doubts("eagle3", described, targeted(torch.bfloat16)) == []
    assert wiring.doubts("eagle3", {}, target) is None


def test_another_rope_theta_is_told(target):
    (doubt, *_) = wiring.doubts("eagle3", wiring.signature(target), targeted(**THETA))
    assert "rope theta" in doubt


def test_another_model_of_the_same_sizes_and_vocabulary_is_told(target):
    module = make_module("llama")
    with torch.no_grad():
        for layer in module.model.layers:
            layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight.roll(1, 0))
    (doubt,) = wiring.doubts("medusa", wiring.signature(target), make_target(module, target.tokenizer))
    assert "another model of these sizes" in doubt
    assert "medusa" in doubt


@pytest.mark.parametrize("name", ["eagle3", "ngram+eagle3", "medusa"])
def test_the_engine_is_told_of_its_own_drafters_target(name, target, tmp_path):
    kind = name.rpartition("+")[2]
    made = artefacts.make(kind, target)
    folder = _write(tmp_path / "a", made, {**made.config["target"], **wiring.signature(target)})
    other = targeted(**THETA)
    for served, expected in ((target, 0), (other, 1)):
        config = EngineConfig(model="tiny", drafter=name, drafter_model=str(folder))
        drafter = DRAFTERS[kind](Workshop(served, config))
        drafter.name = name
        assert len([doubt for doubt in doubts_of(served, drafter, config.drafter_model) if "rope" in doubt]) == expected
    edit(folder, target=made.config["target"])
    assert doubts_of(target, drafter, config.drafter_model) is None


KILLED = """
import os, sys
from pathlib import Path
from outrider.models.heads import files

folder, rename = Path(sys.argv[1]), Path.rename

def killed(self, other):
    if other == folder:
        os._exit(9)  # nothing is cleaned up, as by a kill
    return rename(self, other)

made = files.read(folder)
Path.rename = killed
files.write(folder, made.config, made.tensors, {}, "the new one")
"""


@pytest.mark.parametrize("how", ["read", "locate", "find", "write"])
def test_a_kill_between_the_two_renames_loses_nothing(how, target, tmp_path, monkeypatch):
    shelf = tmp_path / "drafters-trained"
    folder = artefacts.write(shelf / "tiny" / "medusa", "medusa", target)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    source = Path(outrider.__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)], env={**os.environ, "PYTHONPATH": str(source)}, check=False
    )
    assert ran.returncode == 9
    assert not folder.exists()
    monkeypatch.setattr(outrider, "__file__", str(tmp_path / "src" / "outrider" / "__init__.py"))
    if how == "read":
        files.read(folder)
    elif how == "locate":
        assert files.locate("tiny/medusa") == folder
    elif how == "find":
        assert files.find("medusa", target) == folder
    else:
        artefacts.write(folder, "medusa", target, seed=1)
        assert not list(folder.parent.glob(".*.old"))
        return
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_is_being_written_is_not_found(target, tmp_path, monkeypatch):
    folder = artefacts.write(tmp_path / "drafters-trained" / "tiny" / "medusa", "medusa", target)
    folder.rename(folder.with_name(f".medusa.{'0' * 32}"))
    monkeypatch.setattr(outrider, "__file__", str(tmp_path / "src" / "outrider" / "__init__.py"))
    assert files.find("medusa", target) is None
    assert files.come_with("tiny") == frozenset()
