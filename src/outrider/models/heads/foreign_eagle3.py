"""EAGLE-3 heads of others: in the layout of SafeAILab/EAGLE, and in that of `speculators` (Llama's and Qwen3's layer).

Their entry for token x_j stands one position before ours, at every place alike, which no rotation by distance notices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.heads import layouts
from outrider.models.heads.foreign import Head
from outrider.models.heads.layouts import head_dim, rotation

THETA = 10_000.0
"""Of rotation, where a config names none (SafeAILab/EAGLE, cnets.py)."""
LAYER = {"embed_norm": "input_layernorm", "feature_norm": "hidden_norm", **layouts.LAYER}
"""Our names of a layer's parts to theirs."""


def read(head: Head) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors of the artefact.

    Raises:
        ModelError: if it was trained for another target, or is of a form that is not served here.
    """
    head.check_sizes()
    config, weights = head.config, head.weights
    if head.layer.get("num_hidden_layers", 1) != 1:
        raise head.refuse("has more than one layer", "choose one of a single layer")
    tensors = _tensors(head)
    fields: dict[str, Any] = {
        "taps": head.taps(_inputs(head)),
        "fed_back": "normed" if config.get("norm_output") else "raw",
        "residual": "normed" if config.get("norm_before_residual") else "feature",
        "eps": head.layer.get("rms_norm_eps", 1e-6),
        "head_dim": head_dim(head.layer),
        "rope": rotation(head.layer, THETA),
    }
    fields |= {
        "taps_normed": "no",
        "heads_normed": "q_norm.weight" in tensors,
        "rows": "own" if "embed.weight" in tensors else "target",
        "head": "own" if "head.weight" in tensors else "target",
    }
    norms = [weights[f"fc_norm.{index}.weight"] for index in range(len(fields["taps"])) if config.get("fc_norm")]
    if norms:
        fields["taps_normed"] = "each"
        tensors["tap_norms"] = torch.stack(norms)
    elif (config.get("eagle_config") or config).get("norm_before_fc"):
        fields["taps_normed"] = "together"
        tensors["joint_norm.weight"] = weights["input_norm.weight"]
    return fields, tensors


def _tensors(head: Head) -> dict[str, Tensor]:
    weights = head.weights
    prefix = next(p for p in ("midlayer", "layers.0") if f"{p}.hidden_norm.weight" in weights)
    tensors = {"fc.weight": weights["fc.weight"], "final_norm.weight": weights["norm.weight"]}
    for ours, theirs in LAYER.items():
        for part in ("weight", "bias"):
            name = f"{prefix}.{theirs}.{part}"
            if name in weights:
                tensors[f"{ours}.{part}"] = weights[name]
    tensors["kept_ids"], rows = head.vocabulary(weights.get("lm_head.weight"))
    if rows is not None:
        tensors["head.weight"] = rows
    return tensors | head.embedding(bool(head.config.get("embed_requires_grad")))


def _inputs(head: Head) -> list[int]:
    """Layers whose inputs it reads; by its authors the third, the middle one and the third last.

    vLLM's field names them so; the one within `eagle_config`, which SGLang reads, names those whose outputs they are.
    """
    config, count = head.config, head.target.num_layers
    name = "eagle_aux_hidden_state_layer_ids"
    outputs = (config.get("eagle_config") or {}).get(name) or []
    return config.get(name) or [layer + 1 for layer in outputs] or [2, count // 2, count - 3]
