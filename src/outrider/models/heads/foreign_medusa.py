"""Medusa's heads of others: in the layout of FasterDecoding/Medusa, loose or in a whole model, and in that of vLLM.

They start from the target's last state as its own output head sees it, so its last norm becomes the one tap's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.heads.foreign import Head


def read(head: Head) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors of the artefact.

    Raises:
        ModelError: if it was trained for another target, or is of a form that is not served here.
    """
    head.check_sizes()
    blocks, outputs = _parts(head)
    num_heads = len(blocks)
    tensors: dict[str, Tensor] = {}
    for k, layers in enumerate(blocks):
        for b, layer in enumerate(layers):
            if layer["weight"].shape != (head.target.hidden_size,) * 2:
                raise head.differ(f"a block's matrix is {tuple(layer['weight'].shape)}")
            tensors |= {f"heads.{k}.{b}.up.{part}": tensor for part, tensor in layer.items()}
    tensors["kept_ids"], shared = _vocabulary(head, outputs)
    tensors |= shared
    norm, eps = _last_norm(head)
    tensors["tap_norms"] = norm[None]
    whose = "each" if "outputs.0.weight" in tensors else "own" if "head.weight" in tensors else "target"
    fields = {"plain": 1, "rates": "unknown", "head": whose, "taps": [head.target.num_layers - 1]}
    return {**fields, "num_heads": num_heads, "eps": eps}, tensors


def _parts(head: Head) -> tuple[list[list[dict[str, Tensor]]], dict[int, Tensor]]:
    """Blocks of every head, and output rows by head; `lm_head.weight` stands for all as number -1."""
    found: dict[int, dict[int, dict[str, Tensor]]] = {}
    outputs: dict[int, Tensor] = {}
    for name, tensor in head.weights.items():
        words = name.removeprefix("medusa_head.").removeprefix("medusa_heads.").split(".")
        if words[0] == "blocks":  # blocks.{head}.layers.{block}.weight
            found.setdefault(int(words[1]), {}).setdefault(int(words[3]), {})[words[4]] = tensor
        elif words[0] == "lm_heads":
            outputs[int(words[1])] = tensor
        elif name == "lm_head.weight" and "medusa_num_heads" not in head.config:
            outputs[-1] = tensor
        elif words[0].isdigit() and "linear" in words:  # {head}.{block}.linear.weight
            found.setdefault(int(words[0]), {}).setdefault(int(words[1]), {})[words[-1]] = tensor
        elif words[0].isdigit() and len(words) == 3:  # {head}.{number of blocks}.weight
            outputs[int(words[0])] = tensor
    if not found or sorted(found) != list(range(len(found))):
        raise head.refuse("has no blocks by the names of its layout", "fetch it again")
    return [[found[k][b] for b in sorted(found[k])] for k in sorted(found)], outputs


def _vocabulary(head: Head, outputs: dict[int, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Ids that the heads know, and their output rows: one set for all, one each, or the target's own."""
    limit = head.target.vocab_size
    told = head.weights.get("token_map")
    ids = torch.arange(limit) if told is None else told.to(torch.int64)
    order = ids.argsort()
    order = order[ids[order] < limit]
    kept = ids[order].to(torch.int32)
    words = head.target.config.get_text_config(decoder=True).vocab_size

    def rows(tensor: Tensor) -> Tensor:
        if tensor.shape[0] not in (len(ids), words, limit) or tensor.shape[1] != head.target.hidden_size:
            raise head.differ(f"its output rows are {tuple(tensor.shape)}")
        return tensor[kept.long()] if tensor.shape[0] > len(ids) else tensor[order]

    each = {f"outputs.{k}.weight": rows(tensor) for k, tensor in outputs.items() if k >= 0}
    if head.config.get("original_lm_head") or not each:
        shared = outputs.get(-1, outputs.get(0))
        return kept, {} if shared is None else {"head.weight": rows(shared)}
    return kept, each


def _last_norm(head: Head) -> tuple[Tensor, float]:
    """The target's last norm: its factors (H,) and its eps."""
    found = head.target.model.last_norm()
    if found is None:
        raise head.refuse("starts behind the target's last norm, and this target has no RMS norm there", "train one")
    return found
