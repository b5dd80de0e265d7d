"""What draft heads share: the target's shape as they read it, and a decoder layer's verbs over named buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.cache.pages import PageSpec
from outrider.errors import ModelError
from outrider.kernels.base import Kernels, Linear
from outrider.models.heads.files import Artefact
from outrider.models.heads.stage import Buffers, Rows, pack
from outrider.models.lean_spec import rotary_tables
from outrider.models.target import Target

EPS = 1e-5
"""Of the RMS norms where the target's config names none."""
BEYOND = 128
"""Positions of a head's own rotary tables past the target's last one: guesses reach a little further."""

Embed = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention of a draft head over its own stack.

    Entry 0 has no taps and is seen by itself alone: nobody else's heads of these kinds have such an entry.

    Attributes:
        cos, sin: (P, D_rot / 2) float32, the target's own tables where the head does not bring others.
        q_norm, k_norm: (D,) float32, of every head before it is rotated, by `eps`; None where there is none.
    """

    num_heads: int
    page: PageSpec
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0

    @property
    def width(self) -> int:
        """Numbers of q, k and v of one row."""
        return (self.num_heads + 2 * self.page.num_kv_heads) * self.page.key_dim

    def buffers(self) -> dict[str, tuple[int, ...]]:
        heads = (self.num_heads, self.page.key_dim)
        return {"qkv": (self.width,), "q": heads, "mixed": heads}

    def attend(self, kernels: Kernels, b: Buffers, rows: Rows, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """From "qkv", rotated and written, to the mixed values of every row: (T, Hq * D)."""
        self.write(kernels, b["qkv"], rows, k_pages, v_pages, self.num_heads, b["q"])
        scale = self.page.key_dim**-0.5
        return kernels.attention(b["q"], k_pages, v_pages, rows.keys, scale, out=b["mixed"], skip_first=True).flatten(1)

    def write(
        self, kernels: Kernels, qkv: Tensor, rows: Rows, k_pages: Tensor, v_pages: Tensor, num_heads: int, out: Tensor
    ) -> None:
        """Rotated queries of `num_heads` heads to `out`, rotated keys and values to their slots."""
        places = (self.cos, self.sin, rows.positions, rows.slots)
        norms = (self.q_norm, self.k_norm, self.eps)
        kernels.rotate_and_write(qkv, *places, k_pages, v_pages, num_heads, *norms, out=out)


@dataclass(frozen=True, slots=True)
class Mlp:
    """x + down(silu(gate(rms(x))) * up(rms(x))), in place."""

    norm: Tensor
    gate_up: Linear
    down: Linear
    eps: float

    def buffers(self) -> dict[str, tuple[int, ...]]:
        return {"gate_up": (self.gate_up.out_features,), "gated": (self.down.in_features,)}

    def apply(self, kernels: Kernels, b: Buffers, x: Tensor, normed: Tensor) -> None:
        """x: (T, H), read and written; normed: (T, H) to work in."""
        kernels.rms_norm(x, self.norm, self.eps, out=normed)
        self.gate_up(normed, out=b["gate_up"])
        self.down(kernels.silu_mul(b["gate_up"], out=b["gated"]), residual=x, out=x)


def head_size(target: Target) -> int:
    """Of the target's attention heads, as its config gives it."""
    text = target.config.get_text_config(decoder=True)
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size


class Parts:
    """An artefact's tensors as what kernels run.

    Args:
        kind: of the packed weights; see `stage.pack`.

    Raises:
        ModelError: by every method, if the artefact lacks what it names or it has another shape.
    """

    def __init__(self, artefact: Artefact, target: Target, kind: str | None = None) -> None:
        self.config = artefact.config
        self.tensors: Mapping[str, Tensor] = artefact.tensors
        self.drafter = artefact.drafter
        self.target = target
        self.kernels = target.kernels
        self.device = target.device
        self.hidden = target.hidden_size
        self.kind = kind
        own: float | None = artefact.config.get("eps")
        self.eps: float = (
            own if own is not None else getattr(target.config.get_text_config(decoder=True), "rms_norm_eps", EPS)
        )
        self.nbytes = 0
        self._identity: Linear | None = None

    def tensor(self, name: str, *shape: int | None) -> Tensor:
        """A tensor of exactly this shape, None standing for any size."""
        found = self.tensors.get(name)
        if found is None or len(found.shape) != len(shape):
            raise ModelError(f"the {self.drafter} drafter has no tensor {name} of {len(shape)} axes: train it again")
        if any(size not in (None, real) for size, real in zip(shape, found.shape, strict=True)):
            raise ModelError(
                f"tensor {name} of the {self.drafter} drafter has shape {tuple(found.shape)}, not {shape}: it was "
                "trained for another target, or by another version; train it again"
            )
        return found

    def floats(self, name: str, *shape: int | None) -> Tensor:
        """As `tensor`, float32 on the device."""
        made = self.tensor(name, *shape).to(self.device, torch.float32).contiguous()
        self.nbytes += made.nbytes
        return made

    def linear(self, names: list[str], outputs: int | None, inputs: int) -> Linear:
        """Linears of one input side by side, `outputs` of each, with a bias where the artefact has one."""
        weights = [self.tensor(f"{name}.weight", outputs, inputs) for name in names]
        bias = None
        if f"{names[0]}.bias" in self.tensors:
            bias = torch.cat([self.floats(f"{n}.bias", w.shape[0]) for n, w in zip(names, weights, strict=True)])
        made = pack(torch.cat(weights), self.kernels, self.device, self.kind, bias)
        self.nbytes += made.nbytes
        return made

    def embedding(self) -> Embed:
        """(T,) int64 -> (T, H) float32: the target's own rows, or others where "rows" is "own"."""
        if self.config.get("rows", "target") != "own":
            return self.target.model.embed
        rows = self.tensor("embed.weight", self.target.vocab_size, self.hidden)
        made = self.kernels.pack(rows.to(self.device, torch.bfloat16))
        self.nbytes += made.nbytes
        return made.lookup

    def kept_head(self, usual: str = "target") -> Linear:
        """The target's own output rows of the kept ids, or the artefact's where "head" is "own": (T, H) -> (T, V_d)."""
        if self.config.get("head", usual) == "own":
            return self.linear(["head"], self.tensors["kept_ids"].shape[0], self.hidden)
        made = self.target.model.head_rows(self.tensors["kept_ids"].to(self.device, torch.int64))
        self.nbytes += made.nbytes
        return made

    def identity(self) -> Linear:
        """(T, H) -> the same; one for all who ask."""
        if self._identity is None:
            self._identity = pack(torch.eye(self.hidden), self.kernels, self.device, self.kind)
            self.nbytes += self._identity.nbytes
        return self._identity

    def attention(self, prefix: str = "") -> Attention:
        """Sized by the projections, with heads as large as the target's where the config names no other size."""
        dim = self.config.get("head_dim") or head_size(self.target)
        queries, keys = (self.tensor(f"{prefix}{part}_proj.weight", None, None).shape[0] for part in "qk")
        if queries % dim or keys % dim:
            raise ModelError(
                f"the {self.drafter} drafter was trained for heads of another size than the target's {dim}: "
                "train it again"
            )
        normed = self.config.get("heads_normed", False)
        q_norm, k_norm = (self.floats(f"{prefix}{part}_norm.weight", dim) if normed else None for part in "qk")
        cos, sin = self._rotary(dim)
        return Attention(queries // dim, PageSpec(keys // dim, dim, dim), cos, sin, q_norm, k_norm, self.eps)

    def _rotary(self, dim: int) -> tuple[Tensor, Tensor]:
        """The target's tables, or those of the artefact's own rotation."""
        rope = self.config.get("rope")
        if rope is None:
            return self.target.model.rotary()
        positions = self.target.max_positions + BEYOND
        config = LlamaConfig(
            hidden_size=dim,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=dim,
            max_position_embeddings=positions,
            rope_parameters=dict(rope),
        )
        return rotary_tables(LlamaRotaryEmbedding(config).to(self.device), positions, self.device)

    def mlp(self, prefix: str = "") -> Mlp:
        down = self.tensor(f"{prefix}down_proj.weight", self.hidden, None)
        return Mlp(
            self.floats(f"{prefix}post_norm.weight", self.hidden),
            self.linear([f"{prefix}gate_proj", f"{prefix}up_proj"], down.shape[1], self.hidden),
            self.linear([f"{prefix}down_proj"], self.hidden, down.shape[1]),
            self.eps,
        )

    def fused_taps(self, num_taps: int) -> FusedTaps:
        width = num_taps * self.hidden
        way = self.config.get("taps_normed", "each")
        norms = self.floats("tap_norms", num_taps, self.hidden) if way == "each" else None
        joint = self.floats("joint_norm.weight", width) if way == "together" else None
        return FusedTaps(norms, joint, self.linear(["fc"], self.hidden, width), self.eps)


@dataclass(frozen=True, slots=True)
class FusedTaps:
    """fc(concat(rms(tap_i, norm_i))); or one norm over all taps side by side, or none."""

    norms: Tensor | None
    joint: Tensor | None
    fc: Linear
    eps: float

    def apply(self, kernels: Kernels, taps: Tensor, normed: Tensor, out: Tensor) -> None:
        """taps, normed: (T, n H); out: (T, H)."""
        if self.norms is not None:
            hidden = self.norms.shape[1]
            for index, norm in enumerate(self.norms):
                part = slice(index * hidden, (index + 1) * hidden)
                kernels.rms_norm(taps[:, part], norm, self.eps, out=normed[:, part])
        elif self.joint is not None:
            kernels.rms_norm(taps, self.joint, self.eps, out=normed)
        else:
            normed = taps
        self.fc(normed, out=out)
