"""One Llama-like layer's weights, as the kernels run them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.base import Linear
from outrider.models.fetch import Progress, silent
from outrider.models.lean_spec import LeanSpec
from outrider.models.lean_weights import Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; a projection is several linears where a file mixes types."""

    input_norm: Tensor
    qkv: list[Linear]
    o: list[Linear]
    post_norm: Tensor
    gate_up: list[Linear]
    down: list[Linear]
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor
    sin: Tensor
    window: int | None


def fill_layers(
    spec: LeanSpec, weights: Weights, tables: tuple[Tensor, Tensor], progress: Progress = silent
) -> list[Layer]:
    """All layers, one after the other. tables: cos and sin of the rotation. progress: told after each."""
    unrotated = (tables[0][:, :0], tables[1][:, :0])
    layers = []
    for i in range(spec.num_layers):
        layers.append(fill_layer(spec, weights, i, tables if spec.rotary[i] else unrotated))
        progress("layers", i + 1, spec.num_layers)
    return layers


def fill_layer(spec: LeanSpec, weights: Weights, i: int, tables: tuple[Tensor, Tensor]) -> Layer:
    """Layer i; tables: cos and sin of the rotation."""
    name = f"model.layers.{i}"
    return Layer(
        input_norm=weights.vector(f"{name}.input_layernorm"),
        qkv=weights.linears([f"{name}.self_attn.{part}_proj" for part in "qkv"]),
        o=weights.linears([f"{name}.self_attn.o_proj"]),
        post_norm=weights.vector(f"{name}.post_attention_layernorm"),
        gate_up=weights.linears([f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]),
        down=weights.linears([f"{name}.mlp.down_proj"]),
        q_norm=weights.vector(f"{name}.self_attn.q_norm") if spec.qk_norm else None,
        k_norm=weights.vector(f"{name}.self_attn.k_norm") if spec.qk_norm else None,
        cos=tables[0],
        sin=tables[1],
        window=spec.windows[i],
    )


def project(parts: list[Linear], x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The linears side by side, as if they were one."""
    if len(parts) == 1:
        return parts[0](x, residual, out)
    assert residual is None
    if out is None:
        return torch.cat([part(x) for part in parts], dim=1)
    start = 0
    for part in parts:
        part(x, out=out[:, start : start + part.out_features])
        start += part.out_features
    return out
