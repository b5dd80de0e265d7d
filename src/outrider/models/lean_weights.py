"""Where the lean layers' weights come from: a Transformers module, or a GGUF file whose bits are kept as they are."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor, nn

from outrider.kernels.base import Kernels, Linear
from outrider.kernels.packing import quantise_outputs
from outrider.models.fetch import Progress, silent
from outrider.models.gguf import GgufTensor, read_header
from outrider.models.lean_spec import LeanSpec

_WEIGHTS = {
    "float32": "float32 weights",
    "bfloat16": "bfloat16 weights",
    "q4": "4-bit weights",
    "q8": "8-bit weights",
    "int8": "8-bit weights",
}


class Weights(Protocol):
    """Weights under Transformers' names (without `.weight`)."""

    def linears(self, names: Sequence[str]) -> list[Linear]:
        """Linears of the same input, fused into as few as their types allow, in the order of `names`."""

    def vector(self, name: str) -> Tensor:
        """A norm's weight: (H,) float32."""


class Filling(NamedTuple):
    """How lean layers are filled.

    Attributes:
        consume: see `ModuleWeights`. progress: told after every layer.
    """

    consume: bool = False
    progress: Progress = silent


KEEP = Filling()
"""The module stays as it is."""


class ModuleWeights:
    """The parameters of a loaded module, those of linears rounded to the `kind` "int8" where that is asked for.

    Args:
        consume: take each parameter out of the module as it is packed, which is no use afterwards; so that never more
            than one fused projection is held twice.
    """

    def __init__(self, module: nn.Module, kernels: Kernels, kind: str | None = None, consume: bool = False) -> None:
        self._state = module.state_dict()
        self._kernels = kernels
        self._kind = kind
        self._consume = consume
        if consume:
            _empty(module, self._state)

    def _take(self, name: str) -> Tensor:
        return self._state.pop(name) if self._consume else self._state[name]

    def linears(self, names: Sequence[str]) -> list[Linear]:
        """See `Weights.linears`; always one."""
        biases = [self._take(f"{name}.bias") for name in names if f"{name}.bias" in self._state]
        weights = [self._take(f"{name}.weight") for name in names]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        del weights
        bias = torch.cat(biases) if biases else None
        if self._kind is None:
            return [self._kernels.pack(weight, bias)]
        return [self._kernels.pack_quantised(self._kind, *quantise_outputs(weight), None, bias)]

    def vector(self, name: str) -> Tensor:
        """See `Weights.vector`."""
        return self._take(f"{name}.weight").float().clone()


def _empty(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Leave all parameters of a module to its `state` alone, and a shared one to its first name there."""
    seen: set[int] = set()
    for name, weight in list(state.items()):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, None)
        if weight.data_ptr() in seen:
            del state[name]
        seen.add(weight.data_ptr())


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_BLOCKS = {GGMLQuantizationType.Q4_0: "q4", GGMLQuantizationType.Q4_1: "q4", GGMLQuantizationType.Q8_0: "q8"}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`, as llama.cpp's converter writes Llama models."""
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.{suffix}"


class GgufWeights:
    """The tensors of a GGUF file of architecture "llama"."""

    def __init__(self, path: Path, spec: LeanSpec, kernels: Kernels) -> None:
        header = read_header(path)
        self._tensors = {t.name: t for t in header.tensors}
        self._spec = spec
        self._kernels = kernels
        with path.open("rb") as file:
            # A private copy-on-write map: nothing is read before it is packed, and nothing is ever written.
            self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        self.fits = header.architecture == "llama" and self._match()

    def _match(self) -> bool:
        """Whether the file holds exactly what the spec describes, in types that the kernels read."""
        expected = {gguf_name(name): shape for name, shape in self._spec.shapes().items()}
        if self._spec.tied:
            expected.pop("output.weight")
        if expected != {t.name: t.shape for t in self._tensors.values()}:
            return False
        return all(
            t.kind in _FLOATS or (t.kind in _BLOCKS and t.shape[-1] % 32 == 0 and len(t.shape) == 2)
            for t in self._tensors.values()
        )

    def linears(self, names: Sequence[str]) -> list[Linear]:
        """See `Weights.linears`; neighbours of one type become one."""
        runs: list[list[str]] = []
        for name in names:
            if runs and self._kind(runs[-1][-1]) == self._kind(name):
                runs[-1].append(name)
            else:
                runs.append([name])
        return [self._linear(run) for run in runs]

    def vector(self, name: str) -> Tensor:
        """See `Weights.vector`."""
        return self._floats(self._tensors[gguf_name(f"{name}.weight")]).float().clone()

    def _kind(self, name: str) -> str:
        kind = self._tensors[gguf_name(f"{name}.weight")].kind
        return _BLOCKS.get(kind) or ("bfloat16" if kind == GGMLQuantizationType.BF16 else "float32")

    def _linear(self, names: list[str]) -> Linear:
        found = [self._tensors[gguf_name(f"{name}.weight")] for name in names]
        bias = self._bias(names)
        kind = self._kind(names[0])
        if kind not in ("q4", "q8"):
            parts = [self._heads(n, self._floats(t)) for n, t in zip(names, found, strict=True)]
            return self._kernels.pack(torch.cat(parts).to(getattr(torch, kind)), bias)
        blocks = [self._blocks(t) for t in found]
        quants, scales, minima = (
            torch.cat([self._heads(n, b[i]) for n, b in zip(names, blocks, strict=True)]) for i in range(3)
        )
        return self._kernels.pack_quantised(kind, quants, scales, minima if kind == "q4" else None, bias)

    def _bias(self, names: list[str]) -> Tensor | None:
        if gguf_name(f"{names[0]}.bias") not in self._tensors:
            return None
        return torch.cat([self._heads(n, self._floats(self._tensors[gguf_name(f"{n}.bias")])) for n in names])

    def _raw(self, tensor: GgufTensor) -> Tensor:
        return self._bytes[tensor.start : tensor.start + tensor.nbytes]

    def _floats(self, tensor: GgufTensor) -> Tensor:
        # A tensor starts at a multiple of the file's alignment, so the bytes may be seen as numbers.
        numbers = self._raw(tensor).view(_FLOATS[tensor.kind]).view(tensor.shape)
        return numbers.float() if tensor.kind == GGMLQuantizationType.F16 else numbers

    def _blocks(self, tensor: GgufTensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quants (N, K), scales (N, K / 32), minima (N, K / 32); blocks as ggml-common.h lays them out."""
        rows, columns = tensor.shape
        blocks = self._raw(tensor).view(rows, columns // 32, -1)

        def half(at: int) -> Tensor:
            return blocks[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0].float()

        scales = half(0)
        if tensor.kind == GGMLQuantizationType.Q8_0:
            return blocks[:, :, 2:].contiguous().view(torch.int8).view(rows, columns), scales, torch.zeros_like(scales)
        first = 4 if tensor.kind == GGMLQuantizationType.Q4_1 else 2
        minima = half(2) if tensor.kind == GGMLQuantizationType.Q4_1 else -8.0 * scales
        nibbles = blocks[:, :, first:]
        return torch.cat([nibbles & 15, nibbles >> 4], dim=2).view(rows, columns), scales, minima

    def _heads(self, name: str, rows: Tensor) -> Tensor:
        """Undo the converter's order of q and k rows, which pairs neighbours where Transformers rotates by halves."""
        if name.endswith("q_proj"):
            heads = self._spec.num_heads
        elif name.endswith("k_proj"):
            heads = self._spec.num_kv_heads
        else:
            return rows
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def in_words(linears: Sequence[Linear]) -> str:
    """The weights of each kind, and what they are multiplied by where that is no float32: one phrase."""
    words = set()
    for linear in linears:
        rounded = " against 8-bit activations in groups of 16" if linear.kind in ("q4", "q8") else ""
        if linear.input_dtype == torch.bfloat16 or linear.kind == "int8":
            rounded = " against bfloat16 activations"
        words.add(_WEIGHTS[linear.kind] + rounded)
    return ", ".join(sorted(words))
