"""Which models the lean layers describe exactly: one row of a table for each `model_type`, and strict checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.quantised import is_dense

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose angles depend on the position alone; the others read the longest position of a whole pass."""


@dataclass(frozen=True, slots=True)
class LeanSpec:
    """A Llama-like decoder: RMS norm, rotary grouped-query attention, RMS norm, gated MLP; residuals around both.

    Attributes:
        prefix: of Transformers' class names. activation: "silu" or "gelu_tanh".
        qkv_bias, o_bias, mlp_bias: which linears have one. qk_norm: RMS norm of every q and k head (Qwen3).
        windows: per layer, positions seen, itself included (None: all). rotary: per layer, False for NoPE (SmolLM3).
        tied: the head is the embedding. max_positions: length of the rotary tables.
    """

    prefix: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    eps: float
    activation: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]
    tied: bool
    max_positions: int

    def part(self, size: int) -> LeanSpec:
        """What each of `size` ranks computes of it: whole heads, and a part of the MLP's inner channels."""
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=self.num_kv_heads // size,
            intermediate=self.intermediate // size,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter of the module and its shape, under Transformers' names."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab_size, self.hidden),
        }
        linears = {
            "self_attn.q_proj": (query, self.hidden, self.qkv_bias),
            "self_attn.k_proj": (kv, self.hidden, self.qkv_bias),
            "self_attn.v_proj": (kv, self.hidden, self.qkv_bias),
            "self_attn.o_proj": (self.hidden, query, self.o_bias),
            "mlp.gate_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.up_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.down_proj": (self.hidden, self.intermediate, self.mlp_bias),
        }
        for i in range(self.num_layers):
            layer = f"model.layers.{i}."
            for name, (rows, columns, bias) in linears.items():
                shapes[f"{layer}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{layer}{name}.bias"] = (rows,)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{layer}{name}.weight"] = (self.hidden,)
            if self.qk_norm:
                for name in ("self_attn.q_norm", "self_attn.k_norm"):
                    shapes[f"{layer}{name}.weight"] = (self.head_dim,)
        return shapes


def _llama(config: Any) -> dict[str, Any]:
    return {
        "prefix": "Llama",
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def _mistral(config: Any) -> dict[str, Any]:
    return {"prefix": "Mistral", "windows": (config.sliding_window,) * config.num_hidden_layers}


def _qwen2(config: Any) -> dict[str, Any]:
    return {"prefix": "Qwen2", "qkv_bias": True, "windows": _windows(config)}


def _qwen3(config: Any) -> dict[str, Any]:
    bias = config.attention_bias
    return {"prefix": "Qwen3", "qkv_bias": bias, "o_bias": bias, "qk_norm": True, "windows": _windows(config)}


def _smollm3(config: Any) -> dict[str, Any]:
    return {
        "prefix": "SmolLM3",
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "windows": _windows(config) if config.use_sliding_window else (None,) * config.num_hidden_layers,
        "rotary": tuple(bool(used) for used in config.no_rope_layers),
    }


_ARCHITECTURES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def _windows(config: Any) -> tuple[int | None, ...]:
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


def spec_of(config: Any) -> LeanSpec | None:
    """The description of a Transformers config, or None where the lean layers do not cover it exactly."""
    describe = _ARCHITECTURES.get(config.model_type)
    activation = _ACTIVATIONS.get(getattr(config, "hidden_act", ""))
    if describe is None or activation is None or config.rope_parameters.get("rope_type") not in ROPE_TYPES:
        return None
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ()
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        return None
    own = describe(config)
    common = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False}
    return LeanSpec(
        hidden=config.hidden_size,
        num_layers=layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
        activation=activation,
        tied=config.tie_word_embeddings,
        max_positions=config.max_position_embeddings,
        **{**common, "windows": (None,) * layers, "rotary": (True,) * layers, **own},
    )


def fits(spec: LeanSpec, module: nn.Module) -> bool:
    """Whether a module is made of nothing but what `spec` describes: its classes, its parameters, one float type."""
    ours = {f"{spec.prefix}{part}" for part in ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")}
    classes = ours | {f"{spec.prefix}RotaryEmbedding", "ModuleList", "Linear", "Embedding"}
    activations = {"SiLUActivation", "SiLU"} if spec.activation == "silu" else {"GELUTanh", "PytorchGELUTanh"}
    if not {type(m).__name__ for m in module.modules()} <= classes | activations:
        return False
    state = module.state_dict(keep_vars=True)
    if {name: tuple(p.shape) for name, p in state.items()} != spec.shapes():
        return False
    if spec.tied != (state["lm_head.weight"] is state["model.embed_tokens.weight"]):
        return False
    if not all(is_dense(p) for p in state.values()):
        return False
    dtypes = {p.dtype for p in state.values()}
    return len(dtypes) == 1 and dtypes <= {torch.float32, torch.bfloat16}


def rotary_tables(rotary: nn.Module, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position by Transformers' own module: (P, D_rot / 2) float32 each, their scale included."""
    positions = torch.arange(num_positions, device=device)[None]
    cos, sin = rotary(torch.zeros(1, device=device), positions)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
