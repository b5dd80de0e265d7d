"""The layouts in which others write draft heads: which is which by its config, its weights as they lie there."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outrider.errors import ModelError
from outrider.registry import AUTHORS, FOREIGN, THERE

LAYER = {
    "post_norm": "post_attention_layernorm",
    **{f"{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
}
"""Our names of a layer's parts to theirs, in every layout."""
_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Of positions: those that depend on nothing but the distance between two."""


def recognised(config: Mapping[str, Any]) -> str | None:
    """The drafter that reads a head with this config.json; None for what is no head of others.

    Sources: `speculators` names its kinds; EAGLE-3's, DFlash's and Medusa's authors each have fields of their own.

    Raises:
        ModelError: for a head of a kind that no drafter here reads.
    """
    kinds = {THERE[name][0]: name for name in FOREIGN}
    told = config.get("speculators_model_type")
    if told is not None:
        if told not in kinds:
            raise ModelError(
                f"no drafter here reads heads of the kind {told!r}: give one of {', '.join(sorted(kinds))}"
            )
        return kinds[told]
    if config.get("model_type") in kinds:  # vLLM's Medusa
        return kinds[config["model_type"]]
    return next((name for name, mark in AUTHORS.items() if mark in config), None)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name, from its safetensors files or else from PyTorch's.

    Raises:
        ModelError: if there are none that can be read.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    tensors: dict[str, Tensor] = {}
    try:
        for file in files:
            safe = file.suffix == ".safetensors"
            tensors |= load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, pickle.UnpicklingError, ValueError, RuntimeError, TypeError) as error:
        raise ModelError(f"the weights in {folder} are damaged: fetch them again") from error
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelError(f"{folder} has a head's config.json but no weights that can be read: fetch it whole")
    return tensors


def config_of(folder: Path) -> dict[str, Any]:
    """A folder's config.json; empty where there is none that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def described(folder: Path) -> dict[str, Any]:
    """A folder's config.json; empty where there is none that can be read, or it is not that of a trained drafter.

    Of a head of others what is known without its target: the drafter that reads it.
    """
    config = config_of(folder)
    if isinstance(config.get("target"), dict) and "drafter" in config:
        return config
    foreign = recognised(config)
    return {} if foreign is None else {"drafter": foreign, "target": {}}


def rotation(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """How a config's positions are rotated, as Transformers' `rope_parameters` say it.

    theta: where the config names none.

    Raises:
        ModelError: for a rotation that depends on more than the distance of two positions, or turns a part of a head.
    """
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = told.get("rope_type") or told.get("type") or "default"
    share = told.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind not in _ROTATIONS or share not in (None, 1, 1.0):
        raise ModelError(
            f"its positions are rotated in a way that draft heads have not here ({kind}, {share} of a head): choose "
            f"a head with one of {', '.join(_ROTATIONS)}"
        )
    base = told.get("rope_theta") or config.get("rope_theta") or theta
    kept = {key: value for key, value in told.items() if key not in ("type", "partial_rotary_factor")}
    return {**kept, "rope_type": kind, "rope_theta": float(base)}


def head_dim(config: Mapping[str, Any]) -> int:
    """Size of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
