"""DFlash heads of others: in the layout of z-lab/dflash, and in that of `speculators`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.heads import layouts
from outrider.models.heads.foreign import Head
from outrider.models.heads.layouts import head_dim, rotation

THETA = 1_000_000.0
"""Of rotation, where a config names none (vLLM, qwen3_dflash.py; Qwen3's own)."""
LAYER = {"input_norm": "input_layernorm", **layouts.LAYER}
"""Our names of a layer's parts to theirs."""


def read(head: Head) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors of the artefact.

    Raises:
        ModelError: if it was trained for another target, or is of a form that is not served here.
    """
    head.check_sizes()
    config, own = head.config, head.config.get("dflash_config") or {}
    _check_form(head, own)
    told = config.get("aux_hidden_state_layer_ids")
    inputs = told if told is not None else [layer + 1 for layer in own["target_layer_ids"]]
    mask = config.get("mask_token_id", own.get("mask_token_id"))
    fields = {
        "taps": head.taps(inputs),
        "sees": "both ways",
        "block_size": config.get("block_size") or own["block_size"],
        "mask_token_id": mask,
        "eps": head.layer.get("rms_norm_eps", 1e-6),
        "head_dim": head_dim(head.layer),
        "rope": rotation(head.layer, THETA),
    }
    tensors = _tensors(head, int(mask))
    forms = {"taps_normed": "no", "heads_normed": True, "head": "own" if "head.weight" in tensors else "target"}
    return fields | forms, tensors


def _tensors(head: Head, mask: int) -> dict[str, Tensor]:
    weights, target = head.weights, head.target
    tensors = {
        "fc.weight": weights["fc.weight"],
        "ctx_norm.weight": weights["hidden_norm.weight"],
        "final_norm.weight": weights["norm.weight"],
    }
    for index in range(head.layer["num_hidden_layers"]):
        for ours, theirs in LAYER.items():
            for part in ("weight", "bias"):
                name = f"layers.{index}.{theirs}.{part}"
                if name in weights:
                    tensors[f"layers.{index}.{ours}.{part}"] = weights[name]
    tensors["kept_ids"], rows = head.vocabulary(weights.get("lm_head.weight"))
    trimmed = len(tensors["kept_ids"]) < target.vocab_size
    if rows is not None and (trimmed or not _is_targets(head, rows)):
        tensors["head.weight"] = rows
    head.embedding(trained=False)  # refused where they are another target's
    tensors["mask"] = _mask_row(head, mask)
    return tensors


def _mask_row(head: Head, mask: int) -> Tensor:
    """(H,): the input row of the id that stands for what is not known yet; it may lie in the table's padding."""
    rows = head.weights.get("embed_tokens.weight")
    if rows is not None:
        return rows[mask]
    if not 0 <= mask < head.target.config.get_text_config(decoder=True).vocab_size:
        raise head.differ(f"its mask is the id {mask}, which this target's table has not")
    return head.target.model.embed(torch.tensor([mask], device=head.target.device))[0].cpu()


def _is_targets(head: Head, rows: Tensor) -> bool:
    """Whether output rows of every id are a copy of the target's, which need not be kept twice."""
    own = head.target.model.head_rows(torch.arange(8, device=head.target.device))
    states = torch.eye(head.target.hidden_size, device=head.target.device)
    return bool(torch.allclose(own(states).T.cpu(), rows[:8].float(), rtol=1e-2, atol=1e-3))


def _check_form(head: Head, own: dict[str, Any]) -> None:
    """Refuse what this package's arithmetic has not.

    Raises:
        ModelError: naming it.
    """
    remedy = "choose a DFlash head that looks both ways over its whole context"
    if head.config.get("sample_from_anchor") or own.get("sample_from_anchor"):
        raise head.refuse("guesses from its anchor, too", remedy)
    if "sliding_attention" in (head.layer.get("layer_types") or []) or own.get("use_swa"):
        raise head.refuse("sees a sliding window only", remedy)
    if own.get("causal") or head.layer.get("is_causal"):
        raise head.refuse("looks back only", remedy)
    if any(name.endswith(("g_proj.weight", "qkv_proj.weight")) for name in head.weights):
        raise head.refuse("has layers of another kind than Qwen3's", remedy)
