"""Widened twins: a small model enlarged to the shape of a large one, which says exactly what the small one says.

Function-preserving growth (Net2Net, Chen et al., 1511.05641) by parts that contribute exactly nothing and cost what
real ones cost:

- added hidden channels hold zero: what writes into the residual stream has zero rows there. A norm's mean is taken over
  H' channels instead of H, so its weight is scaled by sqrt(H / H') and its epsilon by H / H'.
- added heads, MLP units and layers compute something, and the projection behind them does not read it.
- a head that grows from D to m D dimensions keeps its rotary pairs at every m-th frequency, where the larger head has
  the very angles of the smaller one; the rest of its queries is zero. That the scores are now divided by sqrt(m D) is
  undone in the tables of rotation, which are scaled by the fourth root of m: no weight is rounded anew.
- added words are barred: one added channel carries a constant, whose square is taken off the epsilon of every norm, so
  that it is not felt; only the output rows of added words read it, with a weight that leaves them no chance. As input,
  added words repeat the real ones.

All other added weights are random, so that nothing can be skipped. The twin is untied, as large models are.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.lean_spec import LeanSpec
from outrider.models.shapes import Shape

SPREAD = 0.02
"""Standard deviation of added weights: that of a fresh model."""
BARRED = -1e8
"""What the output row of an added word makes of the constant channel, which holds some hundredths."""


RANDOM, ZERO, SILENT = "random", "zero", "silent"
"""What a matrix's added parts hold: noise; nothing; or noise in added columns (which read zeros), nothing in rows."""
_MATRICES: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "q_proj": ("q", "read", RANDOM),
        "k_proj": ("k", "read", RANDOM),
        "v_proj": ("v", "read", RANDOM),
        "o_proj": ("read", "mix", ZERO),
        "gate_proj": ("inner", "read", RANDOM),
        "up_proj": ("inner", "read", RANDOM),
        "down_proj": ("read", "inner", ZERO),
        "fc": ("read", "read", SILENT),
        "in_proj": ("read", "read", SILENT),
        "adapter": ("read", "read", SILENT),
        "up": ("read", "read", RANDOM),
        "down": ("read", "read", ZERO),
        "head": ("words", "read", RANDOM),
        "lm_head": ("words", "read", RANDOM),
        "embed_tokens": ("words", "read", ZERO),
        "markov_gate": ("same", "read", RANDOM),
    }
)
"""By the last part of a tensor's name: its axes ("read": one or more times the channels), what added parts hold."""
_NORMS = frozenset(
    (
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
        "tap_norms",
        "embed_norm",
        "feature_norm",
        "ctx_norm",
        "input_norm",
        "post_norm",
        "final_norm",
    )
)
_STATES = frozenset(("mask", "confidence_state"))
"""Vectors of channels that are no norm's."""
_KEPT = frozenset(
    ("kept_ids", "rates", "markov_in", "markov_out", "markov_carry", "confidence_prev", "confidence_bias")
)
"""What has no channels."""


class Widening:
    """From the tensors of a small model, or of a draft head over its states, to those of a large one, one at a time.

    Args:
        seed: of the added weights, together with their name. barred: added words are barred by the constant channel;
            else their output rows are the mean of the real ones, so that the best real word beats them.

    Raises:
        ModelError: if the large shape does not hold the small one, or the small model has parts that no rule covers.
    """

    def __init__(
        self,
        small: LeanSpec,
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        barred: bool = True,
    ) -> None:
        _check(small, shape)
        self.small, self.shape = small, shape
        self.device, self.dtype, self.seed = device, dtype, seed
        # Half of what epsilon stands for goes to the constant, in a number that every type can hold.
        share = math.sqrt(small.eps * small.hidden / 2) if barred else 0.0
        self.constant = float(torch.tensor(share, dtype=torch.bfloat16))
        self.eps = (small.eps * small.hidden - self.constant**2) / shape.hidden
        self.stretch = shape.head_dim // small.head_dim
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        lanes = torch.arange(small.head_dim)
        self._axes = {
            "q": (self._lanes(self._query_heads(), self._rotated()), queries),
            "k": (self._lanes(torch.arange(small.num_kv_heads), self._rotated()), keys),
            "v": (self._lanes(torch.arange(small.num_kv_heads), lanes), keys),
            "mix": (self._lanes(self._query_heads(), lanes), queries),
            "inner": (torch.arange(small.intermediate), shape.intermediate),
        }

    def spec(self) -> LeanSpec:
        """What the lean layers compute."""
        layers = self.shape.num_layers
        return replace(
            self.small,
            **asdict(self.shape),
            eps=self.eps,
            windows=(None,) * layers,
            rotary=(True,) * layers,
            tied=False,
        )

    def config(self, config: Any) -> Any:
        """The Transformers config of the twin, from the original's."""
        made, shape = copy.deepcopy(config), self.shape
        made.hidden_size, made.intermediate_size, made.vocab_size = shape.hidden, shape.intermediate, shape.vocab_size
        made.num_hidden_layers, made.rms_norm_eps, made.tie_word_embeddings = shape.num_layers, self.eps, False
        made.num_attention_heads, made.num_key_value_heads = shape.num_heads, shape.num_kv_heads
        made.head_dim = shape.head_dim
        return made

    def rotary_scale(self) -> float:
        """What cos and sin are multiplied by, so that scores over the root of the larger head are the smaller one's."""
        return float(self.stretch**0.25)

    def write(self, state: Mapping[str, Tensor], name: str, out: Tensor) -> None:
        """Write the twin's parameter of that name, from the original's state, into `out`.

        An added layer is an earlier one that nothing is written by.
        """
        words = name.split(".")
        if words[1] == "layers" and int(words[2]) >= self.small.num_layers:
            words[2] = str(int(words[2]) % self.small.num_layers)
            if _MATRICES.get(_kind(name), ("", "", RANDOM))[2] == ZERO:
                out.zero_()
                return
        part = state[".".join(words)]
        if out.dim() == 2:
            self.fill(name, part, out)
        else:
            out.copy_(self.tensor(name, part))

    def tensor(self, name: str, part: Tensor, words: int | None = None) -> Tensor:
        """The twin's tensor of that name from the original's, on the device; vectors are float32, whatever `dtype` is.

        words: rows of an output head (None: the shape's vocabulary).

        Raises:
            ModelError: for a name that no rule covers.
        """
        kind = _kind(name)
        if kind in _MATRICES:
            rows, columns, _ = _MATRICES[kind]
            count = (words or self.shape.vocab_size) if rows == "words" else self._places(rows, part.shape[0])[1]
            out = self._empty(count, self._places(columns, part.shape[1])[1])
            self.fill(name, part, out)
            return out
        if kind in _KEPT:
            return part.to(self.device)
        if kind not in _NORMS | _STATES:
            raise ModelError(f"the tensor {name} has no rule by which it could be widened: choose another drafter")
        return self._vector(name, part.to(self.device, torch.float32))

    def fill(self, name: str, part: Tensor, out: Tensor) -> None:
        """Write the twin's matrix of that name, from the original's, into `out`."""
        kind = _kind(name)
        rows_axis, columns_axis, added = _MATRICES[kind]
        rows, columns = self._places(rows_axis, part.shape[0])[0], self._places(columns_axis, part.shape[1])[0]
        part = part.to(self.device, self.dtype)
        if added == ZERO:
            out.zero_()
        else:
            self.noise(name, out)
        if added == SILENT:
            out[self.small.hidden :] = 0
        if rows_axis == "q":
            whole = self._lanes(self._query_heads(), torch.arange(self.shape.head_dim))
            out[whole.to(self.device)] = 0  # lanes that no real query has
        out[rows.to(self.device)[:, None], columns.to(self.device)] = part
        if rows_axis == "words":
            self._add_words(kind == "embed_tokens", part, out)

    def noise(self, name: str, out: Tensor) -> None:
        """Fill with random weights."""
        generator = torch.Generator(self.device).manual_seed(self.seed + zlib.crc32(name.encode()))
        out.normal_(0.0, SPREAD, generator=generator)

    def _add_words(self, is_input: bool, part: Tensor, out: Tensor) -> None:
        count, hidden = part.shape[0], self.small.hidden
        if is_input:
            repeated = torch.arange(out.shape[0], device=self.device) % count
            out[:, :hidden] = part[repeated]
            out[:, -1] = self.constant
        elif self.constant:
            out[:count, -1] = 0
            out[count:, -1] = BARRED
        else:
            out[count:, :hidden] = part.float().mean(dim=0).to(self.dtype)

    def _vector(self, name: str, part: Tensor) -> Tensor:
        """(..., H) -> (..., H') float32. No norm reads the constant but the last one."""
        out = torch.zeros(*part.shape[:-1], self.shape.hidden, device=self.device)
        kind, hidden = _kind(name), self.small.hidden
        if kind in _NORMS:
            self.noise(name, out)
            out[..., -1] = float(kind == "norm" and bool(self.constant))
            part = part * math.sqrt(hidden / self.shape.hidden)
        out[..., :hidden] = part
        return out

    def _places(self, axis: str, count: int) -> tuple[Tensor, int]:
        """Where the `count` real entries of an axis lie in the twin's, and how long that is."""
        if axis in self._axes:
            return self._axes[axis]
        if axis == "read":
            blocks, hidden = torch.arange(count // self.small.hidden), self.shape.hidden
            places = (blocks[:, None] * hidden + torch.arange(self.small.hidden)).flatten()
            return places, len(blocks) * hidden
        return torch.arange(count), count

    def _query_heads(self) -> Tensor:
        """Where each real query head lies: behind the keys' head that it reads."""
        small, shape = self.small, self.shape
        group, larger = small.num_heads // small.num_kv_heads, shape.num_heads // shape.num_kv_heads
        heads = torch.arange(small.num_heads)
        return heads // group * larger + heads % group

    def _lanes(self, heads: Tensor, lanes: Tensor) -> Tensor:
        """Some lanes of some heads of the twin, head by head."""
        return (heads[:, None] * self.shape.head_dim + lanes).flatten()

    def _rotated(self) -> Tensor:
        """Lanes of a real head's queries and keys: dimension i is rotated together with i + D / 2."""
        pairs = torch.arange(self.small.head_dim // 2) * self.stretch
        return torch.cat((pairs, pairs + self.shape.head_dim // 2))

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


def _kind(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _check(small: LeanSpec, shape: Shape) -> None:
    """Refuse what the rules do not cover exactly."""
    parts = {
        "biases": small.qkv_bias or small.o_bias or small.mlp_bias,
        "norms of queries and keys": small.qk_norm,
        "sliding windows": any(small.windows),
        "layers that do not rotate": not all(small.rotary),
    }
    found = [part for part, there in parts.items() if there]
    if found:
        raise ModelError(f"a model with {found[0]} cannot be widened: choose a Llama without them")
    groups = small.num_heads // small.num_kv_heads, shape.num_heads // shape.num_kv_heads
    for entry in fields(Shape):
        if getattr(small, entry.name) > getattr(shape, entry.name) or groups[0] > groups[1]:
            name, size = entry.name, getattr(small, entry.name)
            raise ModelError(
                f"a model with {name}={size} cannot be widened to {name}={getattr(shape, name)}: choose a larger shape"
            )
    if shape.head_dim % small.head_dim or shape.hidden == small.hidden:
        raise ModelError(
            f"a model of {small.hidden} channels in heads of {small.head_dim} cannot be widened to {shape.hidden} in "
            f"heads of {shape.head_dim}: choose more channels, and heads of a whole multiple"
        )
