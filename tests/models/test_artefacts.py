"""Trained drafters on disk: written whole or not at all, found by their target, refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import outrider
from outrider.config import EngineConfig
from outrider.drafters.base import Workshop
from outrider.engine.resolve import _choice
from outrider.errors import ConfigError, ModelError
from outrider.models.heads import files
from outrider.registry import DRAFTERS, NEED_WEIGHTS, READ_BY
from tests import artefacts
from tests.models.tiny import make_module, make_target, make_tokenizer


@pytest.fixture(scope="module")
def target():
    return make_target(make_module("llama"))


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the folder of drafters that come with the checkout."""
    package = tmp_path / "src" / "outrider"
    package.mkdir(parents=True)
    monkeypatch.setattr(outrider, "__file__", str(package / "__init__.py"))
    return tmp_path / "drafters-trained"


@pytest.mark.parametrize("kind", artefacts.KINDS)
def test_what_is_written_is_read(kind, target, tmp_path):
    made = artefacts.make(kind, target)
    read = files.read(artefacts.write(tmp_path / "a", kind, target))
    assert dict(read.config) == dict(made.config)
    assert read.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert torch.equal(read.tensors[name], tensor)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "provenance.json",
    ]


def test_no_file_is_larger_than_a_shard(target, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", files._HEADER_BYTES + 3000)
    made = artefacts.make("eagle3", target)
    folder = artefacts.write(tmp_path / "a", "eagle3", target)
    shards = list(folder.glob("*.safetensors"))
    assert len(shards) > 5
    assert max(tensor.nbytes for tensor in made.tensors.values()) > 3000
    assert max(shard.stat().st_size for shard in shards) < 3000 + 3000  # the header, and no more
    read = files.read(folder)
    assert read.tensors.keys() == made.tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in made.tensors.items())


@pytest.mark.parametrize("stage", ["save", "rename"])
def test_a_full_disk_leaves_the_old_one_whole(stage, target, tmp_path, monkeypatch):
    folder = artefacts.write(tmp_path / "a", "medusa", target, seed=1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    if stage == "save":
        monkeypatch.setattr(files, "save_torch_state_dict", full)
    else:
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda a, b: full() if b == folder and a.suffix != ".old" else rename(a, b))
    with pytest.raises(OSError, match="No space"):
        artefacts.write(folder, "medusa", target, seed=2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_new_one_takes_the_place_of_the_old(target, tmp_path):
    for seed in (1, 2):
        folder = artefacts.write(tmp_path / "a", "medusa", target, seed=seed)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    made = artefacts.make("medusa", target, seed=2)
    assert torch.equal(files.read(folder).tensors["in_proj.weight"], made.tensors["in_proj.weight"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 48}, "hidden_size is 32 there and 48 here"),
        ({"num_hidden_layers": 5}, "num_hidden_layers is 3 there and 5 here"),
        ({"vocab_size": 100}, "vocab_size is 128 there and 100 here"),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_what_differs(change, named, target, tmp_path):
    artefact = files.read(artefacts.write(tmp_path / "a", "eagle3", target))
    tokenizer = make_tokenizer(change.get("vocab_size", 128))
    with pytest.raises(ModelError, match=named):
        files.check_target(artefact, make_target(make_module("llama", **change), tokenizer))


def test_a_tokenizer_that_gives_ids_another_meaning_is_refused(target, tmp_path):
    artefact = files.read(artefacts.write(tmp_path / "a", "eagle3", target))
    tokenizer = make_tokenizer()
    tokenizer.get_vocab = lambda: {f"w{127 - i}": i for i in range(128)}
    with pytest.raises(ModelError, match="another meaning"):
        files.check_target(artefact, make_target(make_module("llama"), tokenizer))


def test_the_same_target_is_not_refused(target, tmp_path):
    files.check_target(files.read(artefacts.write(tmp_path / "a", "eagle3", target)), target)


def test_damage_is_told_in_one_sentence(target, tmp_path):
    folder = artefacts.write(tmp_path / "a", "medusa", target)
    config = json.loads((folder / "config.json").read_text())
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="damaged or missing"):
        files.read(folder)
    weights.unlink()
    with pytest.raises(ModelError, match="damaged or missing"):
        files.read(folder)
    (folder / "config.json").write_text(json.dumps({**config, "format": 9}))
    with pytest.raises(ModelError, match="format 9"):
        files.read(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="no trained drafter"):
        files.read(folder)


@pytest.mark.parametrize("kind", artefacts.KINDS)
def test_a_tensor_that_is_missing_or_misshapen_is_named(kind, target, tmp_path):
    made = artefacts.make(kind, target)
    for name in made.tensors.keys() - {"kept_ids"}:
        for change in ({}, {name: torch.zeros(*made.tensors[name].shape, 1)}):
            tensors = {key: tensor for key, tensor in made.tensors.items() if key != name} | change
            files.write(tmp_path / "a", made.config, tensors, {}, "")
            config = EngineConfig(model="tiny", drafter=kind, drafter_model=str(tmp_path / "a"))
            if name.startswith("layers.1.") and not change:
                continue  # half a layer is checked, a whole one less is another drafter
            with pytest.raises(ModelError, match=r"tensor|heads"):
                DRAFTERS[kind](Workshop(target, config))


def test_found_by_what_it_was_trained_for(target, shelf):
    other = make_target(make_module("llama", hidden_size=64))
    other.name = "other"
    assert files.find("eagle3", target) is None
    artefacts.write(shelf / "tiny" / "eagle3", "eagle3", other)  # the folder's name is no evidence
    assert files.find("eagle3", target) is None
    folder = artefacts.write(shelf / "misnamed" / "eagle3", "eagle3", target)
    assert files.find("eagle3", target) == folder
    assert files.find("medusa", target) is None
    assert files.locate("misnamed/eagle3") == folder
    twin = make_target(make_module("llama"))
    twin.name = "twin"
    artefacts.write(shelf / "a-twin" / "eagle3", "eagle3", twin)
    assert files.find("eagle3", target) == folder
    assert files.find("eagle3", twin) == shelf / "a-twin" / "eagle3"


@pytest.mark.parametrize("kind", NEED_WEIGHTS)
def test_without_weights_the_command_that_makes_them_is_named(kind, target, shelf):
    with pytest.raises(ModelError, match=f"outrider train {kind} --target tiny"):
        DRAFTERS[kind](Workshop(target, EngineConfig(model="tiny", drafter=kind)))
    with pytest.raises(ModelError, match="there is no trained drafter 'nowhere'"):
        DRAFTERS[kind](Workshop(target, EngineConfig(model="tiny", drafter=kind, drafter_model="nowhere")))


@pytest.mark.parametrize("kind", artefacts.KINDS)
def test_named_weights_choose_their_own_drafter(kind, target, tmp_path):
    folder = artefacts.write(tmp_path / "a", kind, target)
    assert kind in READ_BY["drafter_model"]
    assert _choice(EngineConfig(model="tiny", drafter_model=str(folder)), target)[0] == kind
    assert DRAFTERS[kind](Workshop(target, EngineConfig(model="tiny", drafter_model=str(folder)))).nbytes > 0
    wrong = "medusa" if kind != "medusa" else "block"
    with pytest.raises(ModelError, match=f"of the kind '{kind}'"):
        DRAFTERS[wrong](Workshop(target, EngineConfig(model="tiny", drafter=wrong, drafter_model=str(folder))))


def test_a_trained_norm_holds_its_own_number_of_layers(target, tmp_path):
    folder = str(artefacts.write(tmp_path / "a", "early_exit", target))
    made = DRAFTERS["early_exit"](Workshop(target, EngineConfig(model="tiny", drafter_model=folder)))
    assert made.num_layers == made.needs.target_layers == 1
    with pytest.raises(ConfigError, match="exit_layers=2 differs from the 1 layers"):
        DRAFTERS["early_exit"](Workshop(target, EngineConfig(model="tiny", drafter_model=folder, exit_layers=2)))
