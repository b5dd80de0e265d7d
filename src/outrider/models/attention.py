"""The attention function registered with Transformers: it writes keys and values into pages and reads them back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.cache.pages import Pages, PageSpec
from outrider.errors import ModelError
from outrider.kernels.base import Kernels, KeyIndex

NAME = "outrider"
"""The attention implementation's name, and the keyword under which a `FlatPass` travels through a module."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How one layer calls its attention function: what the pages need and what the kernel is told."""

    page: PageSpec
    window: int | None


@dataclass(eq=False, slots=True)
class FlatPass:
    """One forward pass on its way through a module; every layer's attention receives this object.

    Attributes:
        slots: (T,) int64, where each row's key and value are written.
        keys: where each row finds its keys.
        pages: the stack that is written and read; None only records the calls (attention then yields zeros).
        calls: filled by the attention function, by layer index.
    """

    slots: Tensor
    keys: KeyIndex
    pages: Pages | None
    kernels: Kernels
    calls: dict[int, LayerCall] = field(default_factory=dict)


def register() -> None:
    """Make the function known to Transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    outrider: FlatPass | None = None,
    **_unread: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over a flat batch, with the signature of `transformers.AttentionInterface`.

    query: (1, Hq, T, D), key: (1, Hkv, T, D), value: (1, Hkv, T, Dv) -> (1, T, Hq, Dv), and no weights.
    The mask is ignored: which keys a row sees is `outrider.keys`' business, and the load probe compares the result.

    Raises:
        ModelError: if the pass was not handed down, or the layer asks for something the kernels do not know.
    """
    layer = getattr(module, "layer_idx", None)
    if outrider is None or not isinstance(layer, int):
        missing = "its pass" if outrider is None else "a layer index"
        raise ModelError(
            f"{type(module).__name__} calls attention without {missing}: this architecture cannot be served"
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ModelError(f"{type(module).__name__} looks ahead of each token: this model is an encoder, give a decoder")
    if position_bias is not None:
        raise ModelError(
            f"{type(module).__name__} adds a position bias to its scores: this architecture cannot be served"
        )
    _, num_heads, num_rows, key_dim = query.shape
    value_dim = value.shape[-1]
    # Where keys and values differ in size both are stored at the larger one: zeros change neither score nor sum.
    dim = max(key_dim, value_dim)
    outrider.calls[layer] = LayerCall(PageSpec(key.shape[1], dim, dim), sliding_window)
    if outrider.pages is None:
        return query.new_zeros(1, num_rows, num_heads, value_dim), None

    k_pages, v_pages = outrider.pages.keys[layer], outrider.pages.values[layer]
    k_pages[outrider.slots] = _rows(key, dim).to(k_pages.dtype)
    v_pages[outrider.slots] = _rows(value, dim).to(v_pages.dtype)
    output = outrider.kernels.attention(
        _rows(query, dim).float().contiguous(),
        k_pages,
        v_pages,
        outrider.keys,
        key_dim**-0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return output[..., :value_dim].to(query.dtype).unsqueeze(0), None


def _rows(states: Tensor, dim: int) -> Tensor:
    """(1, heads, T, D) -> (T, heads, dim), padded with zeros."""
    rows = states[0].transpose(0, 1)
    missing = dim - rows.shape[-1]
    return nn.functional.pad(rows, (0, missing)) if missing else rows


def blank_index(num_rows: int, device: torch.device) -> KeyIndex:
    """A key index whose rows all attend to slot 0 alone (the slot nobody owns)."""
    zeros = torch.zeros(num_rows, dtype=torch.int32, device=device)
    return KeyIndex(
        tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        request=zeros,
        linear=zeros,
        tails=zeros[:, None].contiguous(),
        length=torch.ones_like(zeros),
        block_size=1,
    )
