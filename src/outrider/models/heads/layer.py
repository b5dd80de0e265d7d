"""What draft heads share: the target's shape as they read it, and a decoder layer's verbs over named buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.pages import PageSpec
from outrider.errors import ModelError
from outrider.kernels.base import Kernels, Linear
from outrider.models.heads.files import Artefact
from outrider.models.heads.stage import Buffers, Rows, pack
from outrider.models.target import Target

EPS = 1e-5
"""Of the RMS norms where the target's config names none."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention of a draft head over its own stack.

    Attributes:
        cos, sin: (P, D_rot / 2) float32, the target's own tables.
    """

    num_heads: int
    page: PageSpec
    cos: Tensor
    sin: Tensor

    @property
    def width(self) -> int:
        """Numbers of q, k and v of one row."""
        return (self.num_heads + 2 * self.page.num_kv_heads) * self.page.key_dim

    def buffers(self) -> dict[str, tuple[int, ...]]:
        heads = (self.num_heads, self.page.key_dim)
        return {"qkv": (self.width,), "q": heads, "mixed": heads}

    def attend(self, kernels: Kernels, b: Buffers, rows: Rows, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """From "qkv", rotated and written, to the mixed values of every row: (T, Hq * D)."""
        kernels.rotate_and_write(
            b["qkv"], self.cos, self.sin, rows.positions, rows.slots, k_pages, v_pages, self.num_heads, out=b["q"]
        )
        scale = self.page.key_dim**-0.5
        return kernels.attention(b["q"], k_pages, v_pages, rows.keys, scale, out=b["mixed"]).flatten(1)


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
        self.tensors: Mapping[str, Tensor] = artefact.tensors
        self.drafter = artefact.drafter
        self.target = target
        self.kernels = target.kernels
        self.device = target.device
        self.hidden = target.hidden_size
        self.kind = kind
        self.eps: float = getattr(target.config.get_text_config(decoder=True), "rms_norm_eps", EPS)
        self.nbytes = 0

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
        """Linears of one input side by side; `outputs` of each."""
        weight = torch.cat([self.tensor(f"{name}.weight", outputs, inputs) for name in names])
        made = pack(weight, self.kernels, self.device, self.kind)
        self.nbytes += made.nbytes
        return made

    def kept_head(self) -> Linear:
        """The target's own output rows of the kept ids: (T, H) -> (T, V_d)."""
        made = self.target.model.head_rows(self.tensors["kept_ids"].to(self.device, torch.int64))
        self.nbytes += made.nbytes
        return made

    def attention(self, prefix: str = "") -> Attention:
        """Sized by the projections, with heads as large as the target's."""
        dim = head_size(self.target)
        queries, keys = (self.tensor(f"{prefix}{part}_proj.weight", None, None).shape[0] for part in "qk")
        if queries % dim or keys % dim:
            raise ModelError(
                f"the {self.drafter} drafter was trained for heads of another size than the target's {dim}: "
                "train it again"
            )
        cos, sin = self.target.model.rotary()
        return Attention(queries // dim, PageSpec(keys // dim, dim, dim), cos, sin)

    def mlp(self, prefix: str = "") -> Mlp:
        down = self.tensor(f"{prefix}down_proj.weight", self.hidden, None)
        return Mlp(
            self.floats(f"{prefix}post_norm.weight", self.hidden),
            self.linear([f"{prefix}gate_proj", f"{prefix}up_proj"], down.shape[1], self.hidden),
            self.linear([f"{prefix}down_proj"], self.hidden, down.shape[1]),
            self.eps,
        )

    def fused_taps(self, num_taps: int) -> FusedTaps:
        return FusedTaps(
            self.floats("tap_norms", num_taps, self.hidden),
            self.linear(["fc"], self.hidden, num_taps * self.hidden),
            self.eps,
        )


@dataclass(frozen=True, slots=True)
class FusedTaps:
    """fc(concat(rms(tap_i, norm_i)))."""

    norms: Tensor
    fc: Linear
    eps: float

    def apply(self, kernels: Kernels, taps: Tensor, normed: Tensor, out: Tensor) -> None:
        """taps, normed: (T, n H); out: (T, H)."""
        hidden = self.norms.shape[1]
        for index, norm in enumerate(self.norms):
            part = slice(index * hidden, (index + 1) * hidden)
            kernels.rms_norm(taps[:, part], norm, self.eps, out=normed[:, part])
        self.fc(normed, out=out)
