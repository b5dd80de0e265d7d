"""Cuts a Transformers module into one rank's part, by the plan that Transformers itself has for its architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError
from outrider.models.ranks.group import Ranks

_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")
"""Styles of what every rank keeps whole: nothing but rows of an embedding is read, and they are wanted by drafters."""
_CUT = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")
Piece = tuple[slice, ...]
"""What a rank keeps of a parameter, an axis each; nothing of it is left where it keeps zeros instead."""


@torch.no_grad()
def shard(module: Any, ranks: Ranks) -> dict[str, Piece]:
    """Keep this rank's part of every linear that the plan names, in place; sums go in the order of ranks.

    Of a "colwise" linear each rank has some outputs (whole attention heads), of a "rowwise" one some inputs, and its
    bias only rank 0. The embedding and the output head stay whole. What the module computes then is the same on every
    rank, and but for the order of sums what it computed before.

    Returns:
        By name, what was kept of the parameters that were cut.

    Raises:
        ModelError: if there is no plan, or it cannot be carried out by so many ranks.
    """
    name, base = type(module).__name__, getattr(module, module.base_model_prefix)
    plan = getattr(module.config.get_text_config(decoder=True), "base_model_tp_plan", None) or {}
    styles = {style for style in plan.values() if style not in _WHOLE}
    if not styles:
        raise ModelError(f"{name} has no tensor-parallel plan in Transformers: run it without tensor_parallel")
    if strange := sorted(styles - set(_CUT)):
        raise ModelError(
            f"{name} asks for tensor parallelism of the kind {strange[0]!r}, which is not served: run it without "
            "tensor_parallel"
        )
    _check_heads(name, module.config.get_text_config(decoder=True), plan, ranks.size)
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()]
    pieces: dict[str, Piece] = {}
    for path, part in base.named_modules():
        style = next((style for pattern, style in patterns if pattern.fullmatch(path)), None)
        if style in _CUT:
            if not isinstance(part, nn.Linear):
                raise ModelError(
                    f"{name} would have its {path} cut, which is no linear: run it without tensor_parallel"
                )
            for leaf, piece in _cut(part, style, f"{name}'s {path}", ranks).items():
                pieces[f"{module.base_model_prefix}.{path}.{leaf}"] = piece
    return pieces


def _check_heads(name: str, config: Any, plan: dict[str, str], size: int) -> None:
    """A head is computed by one rank, with the keys that it reads."""
    if "colwise" not in (style for key, style in plan.items() if "att" in key):
        return
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or kv_heads % size:
        most = math.gcd(heads, kv_heads)
        fitting = [str(count) for count in range(2, most + 1) if most % count == 0]
        remedy = f"choose {' or '.join(fitting)}" if fitting else "run it without tensor_parallel"
        raise ModelError(
            f"tensor_parallel={size} does not divide the {heads} attention heads and {kv_heads} key-value heads of "
            f"{name}: {remedy}"
        )


def _cut(linear: nn.Linear, style: str, name: str, ranks: Ranks) -> dict[str, Piece]:
    by_outputs = style.startswith("colwise")
    whole = linear.out_features if by_outputs else linear.in_features
    if whole % ranks.size:
        raise ModelError(f"tensor_parallel={ranks.size} does not divide the {whole} channels of {name}: choose another")
    count = whole // ranks.size
    part = slice(ranks.rank * count, (ranks.rank + 1) * count)
    pieces: dict[str, Piece] = {"weight": (part,) if by_outputs else (slice(None), part)}
    linear.weight = _kept(linear.weight[pieces["weight"]])
    linear.out_features, linear.in_features = linear.weight.shape
    if linear.bias is not None and by_outputs:
        pieces["bias"] = (part,)
        linear.bias = _kept(linear.bias[part])
    elif linear.bias is not None and not ranks.leads:
        pieces["bias"] = ()
        linear.bias = _kept(torch.zeros_like(linear.bias))
    if style == "colwise_gather_output":
        linear.register_forward_hook(_after(ranks.columns))
    elif not by_outputs:
        linear.register_forward_hook(_after(ranks.sum))
    if style == "rowwise_split_input":
        linear.register_forward_pre_hook(lambda _, given: (given[0][..., part], *given[1:]))
    return pieces


def _kept(values: Tensor) -> nn.Parameter:
    """A copy, so that what is cut off does not stay in memory."""
    return nn.Parameter(values.clone(), requires_grad=False)


def _after(join: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda _module, _given, output: join(output)
