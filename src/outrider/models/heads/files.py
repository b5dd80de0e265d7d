"""A trained drafter on disk: its description, its weights in small shards, where it came from; written whole or not."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import outrider
from outrider.errors import ModelError
from outrider.models.heads import folders
from outrider.models.heads.layouts import described
from outrider.models.heads.parts import cut, joined
from outrider.models.heads.wiring import seal
from outrider.models.target import Original, Target

FORMAT = 1
SHARD_BYTES = 16 * 2**20
"""Most bytes of one file; what does not fit is cut by rows into `name.part0`, `name.part1`, ..."""
_CONFIG, _INDEX, _WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
_OWN = (_CONFIG, "provenance.json", "README.md", "model*.safetensors", _INDEX)
"""Names of all files of an artefact."""
_HEADER_BYTES = 64 * 2**10
"""Room for a shard's own header."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """A trained drafter.

    Attributes:
        config: {"format", "drafter", "target": as `describe_target` gives it, and fields of its architecture}.
        tensors: by name, as they are stored (bfloat16, indices int32).
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def drafter(self) -> str:
        """The registry's name for it."""
        return str(self.config["drafter"])

    def kept_ids(self) -> Tensor:
        """Target ids that it knows, ascending: (V_d,) int64.

        Raises:
            ModelError: if they are no such ids.
        """
        ids = self.tensors.get("kept_ids")
        if ids is None or ids.dim() != 1 or not len(ids) or ids.is_floating_point():
            raise self._damaged("kept_ids")
        if ids[0] < 0 or bool((ids.diff() < 1).any()):
            raise self._damaged("kept_ids")
        return ids.to(torch.int64)

    def size(self, name: str, default: int | None = None) -> int:
        """A size that its config states, at least 1.

        Raises:
            ModelError: if it does not.
        """
        value = self.config.get(name, default)
        if not isinstance(value, int) or value < 1:
            raise self._damaged(name)
        return value

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Layers of a target of so many that it reads.

        Raises:
            ModelError: if the target has not all of them.
        """
        layers = self.config.get("taps")
        if not isinstance(layers, list) or not layers or any(layer not in range(num_layers) for layer in layers):
            raise self._damaged("taps")
        return tuple(map(int, layers))

    def _damaged(self, name: str) -> ModelError:
        return ModelError(f"{name} of the {self.drafter} drafter is damaged or missing: fetch or train it again")


def trained(name: str) -> Path | None:
    """The folder of a trained drafter: a path, or the alias `TARGET/DRAFTER` of one that comes with the package.

    None for anything else, such as a folder that holds a model of Transformers.
    """
    places = (Path(os.path.expanduser(name)), *(root / name for root in _roots()))  # `~nobody` stays as it is
    for place in places:
        folders.restore(place)
    return next((place for place in places if "drafter" in described(place)), None)


def locate(name: str) -> Path:
    """As `trained`.

    Raises:
        ModelError: if there is none of that name.
    """
    folder = trained(name)
    if folder is None:
        known = sorted(f"{folder.parent.name}/{folder.name}" for folder in _shipped())
        choice = f"an alias ({', '.join(known)}) or " if known else ""
        raise ModelError(f"there is no trained drafter {name!r}: give {choice}a folder that `outrider train` wrote")
    return folder


def kind(folder: Path) -> str:
    """Which drafter a trained drafter's folder is for: a name of the registry."""
    return str(described(folder)["drafter"])


def come_with(model: str) -> frozenset[str]:
    """Drafters that come with the package or the checkout, trained for a target of this very name."""
    configs = (described(folder) for folder in _shipped())
    return frozenset(str(config["drafter"]) for config in configs if config["target"].get("name") == model)


def find(drafter: str, target: Target) -> Path | None:
    """The trained drafter of that name for this target that comes with the package or the checkout, if there is one.

    Its "target" entry decides, then the target's name; for a widened twin it is one of its original's.
    """
    fitting = []
    known = target.original or target
    for folder in _shipped():
        config = described(folder)
        if config.get("drafter") == drafter and not _differences(config["target"], known):
            fitting.append((config["target"].get("name") != _name(known), str(folder), folder))
    return min(fitting)[2] if fitting else None


def trained_for(drafter: str, named: str | None, target: Target) -> Mapping[str, Any] | None:
    """The "target" entry of the trained drafter that an engine's settings lead to; None where they lead to none.

    named: as `wanted` takes it; it may be meant for the other drafter of a cascade. None for a widened twin, too, which
    is held to its original when it is loaded.
    """
    folder = find(drafter, target) if named is None else trained(named)
    config = {} if folder is None else described(folder)
    return config["target"] if config.get("drafter") == drafter and target.original is None else None


def wanted(drafter: str, named: str | None, target: Target) -> Path:
    """The folder that an engine's settings ask for: the one that is named, else the one that `find` finds.

    Raises:
        ModelError: if there is none, naming the command that makes one.
    """
    folder = find(drafter, target) if named is None else locate(named)
    if folder is None:
        raise ModelError(
            f"no {drafter} drafter for {target.name} comes with the package: make one with "
            f"`outrider train {drafter} --target {target.name}` and name its folder as drafter_model"
        )
    return folder


def read(folder: Path, drafter: str | None = None) -> Artefact:
    """A trained drafter, whole.

    Args:
        drafter: the kind that is wanted, where only one will do.

    Raises:
        ModelError: if the folder holds none, is damaged or was edited, is of another format or of another kind.
    """
    folders.restore(folder)
    config = described(folder)
    if "drafter" not in config:
        raise ModelError(f"{folder} holds no trained drafter: give a folder that `outrider train` wrote")
    if not config["target"]:
        raise ModelError(
            f"{folder} holds a head in the layout of others, which is read together with its target: give it as "
            "drafter_model to what generates or serves"
        )
    if config.get("format") != FORMAT:
        raise ModelError(f"{folder} is of format {config.get('format')!r}, this version reads {FORMAT}: train it again")
    if drafter is not None and config["drafter"] != drafter:
        raise ModelError(f"{folder} holds a drafter of the kind {config['drafter']!r}: choose it, or another folder")
    try:
        index = folder / _INDEX
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [_WEIGHTS]
        parts = {key: tensor for name in names for key, tensor in load_file(folder / name).items()}
        tensors = joined(parts)
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(f"the weights in {folder} are damaged or missing: fetch or train the drafter again") from error
    sealed = config.pop("seal", None)  # earlier versions wrote none
    if sealed is not None and sealed != seal(config, tensors):
        raise ModelError(
            f"{folder} is not as it was written, its config.json or its weights were changed: fetch or train the "
            "drafter again"
        )
    return Artefact(config, tensors)


def may_be_written(folder: Path) -> bool:
    """Whether nothing would be lost there: it is new, empty, or holds a trained drafter and nothing else."""
    if not folder.exists():
        return not folder.is_symlink()
    return folder.is_dir() and all(any(path.match(own) for own in _OWN) for path in folder.iterdir())


def write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], provenance: Mapping[str, Any], card: str
) -> None:
    """Write a trained drafter; whatever was there stays whole until the new one is complete.

    Args:
        config: without "format" and "seal", which are added here. tensors: stored in the type they have.

    Raises:
        OSError: if the disk is full or may not be written, or `may_be_written` says no; nothing of the new one is left.
    """
    folders.restore(folder)
    if not may_be_written(folder):
        raise FileExistsError(errno.EEXIST, "something else than a trained drafter is there", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    fresh.mkdir()
    try:
        whole = {"format": FORMAT, **config}
        whole["seal"] = seal(whole, tensors)
        (fresh / _CONFIG).write_text(json.dumps(whole, indent=2) + "\n")
        (fresh / "provenance.json").write_text(json.dumps(dict(provenance), indent=2) + "\n")
        (fresh / "README.md").write_text(card)
        limit = SHARD_BYTES - _HEADER_BYTES
        save_torch_state_dict(dict(cut(tensors, limit)), fresh, max_shard_size=limit)
        for file in fresh.iterdir():
            file.chmod(0o644)  # safetensors makes its files for their owner alone
        folders.replace(fresh, folder)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(folder)) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def describe_target(target: Target) -> dict[str, Any]:
    """What binds a drafter to its target: sizes, and a digest of what every id means."""
    return {**_sizes(target), "vocabulary_sha256": vocabulary_digest(target)}


def check_target(artefact: Artefact, target: Target | Original) -> None:
    """Refuse a drafter that was trained for another target.

    Raises:
        ModelError: naming what differs.
    """
    differences = _differences(artefact.config["target"], target)
    if not differences and "kept_ids" in artefact.tensors and artefact.kept_ids()[-1] >= target.vocab_size:
        differences = [f"it knows the id {int(artefact.kept_ids()[-1])}, which is beyond the vocabulary"]
    if differences:
        raise ModelError(
            f"the {artefact.drafter} drafter was trained for another target than {target.name} "
            f"({'; '.join(differences)}): train one with `outrider train {artefact.drafter} --target {target.name}`"
        )


def _differences(described: Mapping[str, Any], target: Target | Original) -> list[str]:
    sizes = _sizes(target)
    found = [
        f"{key} is {described.get(key)!r} there and {value!r} here"
        for key, value in sizes.items()
        if key != "name" and described.get(key) != value
    ]
    if not found and described.get("vocabulary_sha256") != vocabulary_digest(target):
        found.append("its tokenizer gives ids another meaning")
    return found


def _sizes(target: Target | Original) -> dict[str, Any]:
    return {
        "name": _name(target),
        "model_type": target.config.model_type,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": target.num_layers,
        "vocab_size": target.vocab_size,
    }


def _name(target: Target | Original) -> str:
    """An alias or hub id as it is; of a folder its last part, which means something on other machines too."""
    return Path(target.name).name if Path(target.name).is_absolute() else target.name


def vocabulary_digest(target: Target | Original) -> str:
    """Of what every id means: models that share it can learn from each other's texts."""
    words = sorted((token, word) for word, token in target.tokenizer.get_vocab().items() if token < target.vocab_size)
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _roots() -> list[Path]:
    """Where trained drafters come from: inside an installed package, or in the checkout around it."""
    package = Path(outrider.__file__).parent
    return [package / "trained", package.parents[1] / "drafters-trained"]


def _shipped() -> list[Path]:
    for root in _roots():
        for parent in root.glob("*"):
            folders.restore_all(parent)
    # What begins with a dot is being written, or was when its process was killed.
    return [folder.parent for root in _roots() for folder in sorted(root.glob(f"*/[!.]*/{_CONFIG}"))]
