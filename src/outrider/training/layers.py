"""What draft modules share: the target's shape, RMS norms, rotary attention over grouped heads, a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from outrider.errors import ModelError

BEYOND = 128
"""Rotary positions past the target's last one."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a target that a draft module takes over.

    Attributes:
        hidden: H. eps: of its RMS norms. max_positions: length of the rotary tables.
    """

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    max_positions: int
    eps: float

    @classmethod
    def of(cls, module: Any) -> Shape:
        """Of a Transformers causal language model.

        Raises:
            ModelError: for a model whose config lacks one of the sizes.
        """
        text = module.config.get_text_config(decoder=True)
        try:
            heads = text.num_attention_heads
            return cls(
                hidden=text.hidden_size,
                num_layers=text.num_hidden_layers,
                num_heads=heads,
                num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
                head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
                intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
                vocab_size=text.vocab_size,
                max_positions=text.max_position_embeddings,
                eps=getattr(text, "rms_norm_eps", 1e-5),
            )
        except AttributeError as error:
            raise ModelError(
                f"no drafter can be shaped after {text.model_type}: its config has no {error.name}"
            ) from error

    def rotary_tables(self, module: Any) -> tuple[Tensor, Tensor] | None:
        """cos and sin of every position by the target's own module, (P, D_rot / 2) float32 each; None without one.

        Padding and unrolled steps reach a little beyond the target's last position.
        """
        rotary = getattr(getattr(module, module.base_model_prefix), "rotary_emb", None)
        if rotary is None or getattr(rotary, "layer_types", None):
            return None
        device = module.get_input_embeddings().weight.device
        if device.type == "meta":  # without weights it shows that there are tables, and none of their values
            blank = torch.empty(self.max_positions + BEYOND, 0, device=device)
            return blank, blank
        # A rotation that stretches with the farthest position (dynamic NTK) must not hear yet of those beyond.
        parts = torch.arange(self.max_positions + BEYOND, device=device)[None].split(self.max_positions, dim=1)
        tables = [rotary(torch.zeros(1, device=device), positions) for positions in parts]
        cos, sin = (torch.cat(part, dim=1) for part in zip(*tables, strict=True))
        half = cos.shape[-1] // 2
        return cos[0, :, :half].float(), sin[0, :, :half].float()


QUIET = 0.25
"""Share of the target's own logits that a fresh head over them begins with: nothing is right yet, so nothing is sure
(on SmolLM2-135M the KL of a fresh EAGLE-3 head is 16 at full size and 7 at a fifth)."""


def final_norm(module: Any) -> Tensor:
    """What the target's last norm multiplies by, (H,) float32; ones where it is not an RMS norm."""
    norm = getattr(getattr(module, module.base_model_prefix), "norm", None)
    ones = torch.ones_like(module.get_input_embeddings().weight[0])
    if norm is None or getattr(norm, "bias", None) is not None:
        return ones.float()
    # The RMS of ones is 1, so that what comes out is the factor, however the class keeps it (Gemma's is 1 + weight).
    return norm(ones[None])[0].detach().float()


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, in float32."""
    return rms_norm(states.float(), states.shape[-1:], weight, eps)


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """A linear without bias whose outputs have about `gain` times the size of its inputs."""
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=gain * inputs**-0.5)
    return made


def shifted(states: Tensor) -> Tensor:
    """(B, S, ...) states moved one position later, zeros first: the entry of x_j uses the tap of position j - 1."""
    return torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)


def normed_taps(states: Mapping[int, Tensor], taps: Sequence[int], norms: Tensor, eps: float) -> list[Tensor]:
    """What an entry reads of each tapped layer: its state of the position before, normed; (B, S, H) each."""
    return [norm(shifted(states[tap]), weight, eps) for tap, weight in zip(taps, norms, strict=True)]


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads (B, h, T, D) at T positions whose rows of the tables are (..., T, D_rot / 2)."""
    half = cos.shape[-1]
    first, second, rest = states.split([half, half, states.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos.to(states.dtype), sin.to(states.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of (B, h, T, D) over (B, h_kv, K, D), causal where there is no mask -> (B, T, h * D)."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
    return mixed.transpose(1, 2).flatten(2)


def gated(states: Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Tensor:
    """The Llama MLP: down(silu(gate(x)) * up(x))."""
    return down(silu(gate(states)) * up(states))
