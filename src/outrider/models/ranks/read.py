"""Reads this rank's part of a model and no more: of a tensor that is cut, the piece that is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from outrider.models import checks
from outrider.models.checks import Source
from outrider.models.convert import quiet
from outrider.models.ranks.group import Ranks
from outrider.models.ranks.plan import Piece, shard


@torch.no_grad()
def read_part(source: Source, config: Any, dtype: torch.dtype, ranks: Ranks) -> Any | None:
    """The module, cut by `shard` before anything is read, with the weights of this rank's part.

    None where the folder's tensors are not the module's own, one by one: Transformers then knows how to make these of
    those, or what is wrong with them.

    Raises:
        ModelError: if a file is damaged, or the model cannot be shared so.
    """
    if source.folder is None:
        return None
    checks.check_weight_files(source.name, source.folder)
    with quiet(), init_empty_weights(include_buffers=False):
        module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    where, tied = _tensors(source.folder), _tied(module)
    if module._keep_in_fp32_modules or set(module.state_dict()) != names or set(where) | tied != names | tied:
        return None
    pieces = shard(module, ranks)
    for file in sorted(set(where.values())):
        with safe_open(file, framework="pt") as tensors:
            for name in (name for name, holder in where.items() if holder == file and name in names - tied):
                _put(module, name, _piece(tensors, name, pieces.get(name)).to(dtype))
    module.tie_weights()
    if any(parameter.is_meta for parameter in module.parameters()):
        return None
    module.generation_config = checks.read_generation_config(source) or module.generation_config
    return module.eval()


def _tensors(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in listed.items()}
    where: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            where |= dict.fromkeys(tensors.keys(), file)
    return where


def _tied(module: Any) -> set[str]:
    """The output head's weight, where it is the embedding."""
    return {"lm_head.weight"} if module.config.get_text_config(decoder=True).tie_word_embeddings else set()


def _piece(tensors: Any, name: str, piece: Piece | None) -> Tensor:
    if piece is None:
        whole: Tensor = tensors.get_tensor(name)
        return whole
    part = tensors.get_slice(name)
    if not piece:
        return torch.zeros(part.get_shape())
    read: Tensor = part[piece]
    return read.contiguous()


def _put(module: nn.Module, name: str, values: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module.get_submodule(parent)._parameters[leaf] = nn.Parameter(values, requires_grad=False)
