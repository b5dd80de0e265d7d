"""Trained drafters with random weights, for any target: small, whole, and wrong most of the time."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.models.heads import files
from outrider.models.heads.layer import head_size
from outrider.registry import NEED_WEIGHTS

NUM_RANKS = 8
BLOCK = 4


class _Maker:
    """Random tensors for one target: weights of about unit gain, norms near one, in bfloat16 as artefacts are."""

    def __init__(self, target: Any, seed: int = 0, keep: float = 0.8, most: int = 1024) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.target = target
        self.hidden: int = target.hidden_size
        self.layers: int = target.num_layers
        self.dim = head_size(target)
        vocab = target.vocab_size
        order = torch.randperm(vocab, generator=self.generator)
        self.kept = order[: min(most, max(4, int(keep * vocab)))].sort().values.int()
        self.heads, self.kv_heads, self.inner = 2, 1, 2 * self.hidden

    def weight(self, *shape: int, gain: float = 1.5) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * gain * shape[-1] ** -0.5).bfloat16()

    def norm(self, *shape: int) -> Tensor:
        return (1 + 0.2 * torch.randn(*shape, generator=self.generator)).bfloat16()

    def layer(self, prefix: str, inputs: int) -> dict[str, Tensor]:
        """A decoder layer's projections and its second norm."""
        queries, keys = self.heads * self.dim, self.kv_heads * self.dim
        shapes = {
            "q": (queries, inputs),
            "k": (keys, inputs),
            "v": (keys, inputs),
            "o": (self.hidden, queries),
            "gate": (self.inner, self.hidden),
            "up": (self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }
        tensors = {f"{prefix}{name}_proj.weight": self.weight(*shape) for name, shape in shapes.items()}
        return {**tensors, f"{prefix}post_norm.weight": self.norm(self.hidden)}

    def taps(self, count: int) -> list[int]:
        return [round(i * (self.layers - 1) / max(1, count - 1)) for i in range(count)]


def _eagle3(m: _Maker) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {
        "tap_norms": m.norm(3, m.hidden),
        "fc.weight": m.weight(m.hidden, 3 * m.hidden),
        "embed_norm.weight": m.norm(m.hidden),
        "feature_norm.weight": m.norm(m.hidden),
        **m.layer("", 2 * m.hidden),
        "final_norm.weight": m.norm(m.hidden),
        "head.weight": m.weight(len(m.kept), m.hidden, gain=3),
        "kept_ids": m.kept,
    }
    return tensors, {"taps": m.taps(3)}


def _block(m: _Maker) -> tuple[dict[str, Tensor], dict[str, Any]]:
    rank = 4
    tensors = {
        "tap_norms": m.norm(5, m.hidden),
        "fc.weight": m.weight(m.hidden, 5 * m.hidden),
        "ctx_norm.weight": m.norm(m.hidden),
        "mask": m.weight(m.hidden),
        **m.layer("layers.0.", m.hidden),
        **m.layer("layers.1.", m.hidden),
        **{f"layers.{i}.input_norm.weight": m.norm(m.hidden) for i in range(2)},
        "final_norm.weight": m.norm(m.hidden),
        "adapter.weight": torch.eye(m.hidden).bfloat16() + m.weight(m.hidden, m.hidden, gain=0.2),
        "markov_in.weight": m.weight(len(m.kept), rank),
        "markov_out.weight": m.weight(len(m.kept), rank),
        "markov_gate.weight": m.weight(rank, m.hidden),
        "markov_carry.weight": m.weight(rank, rank),
        "confidence_state": m.weight(m.hidden),
        "confidence_prev": m.weight(rank),
        "confidence_bias": torch.tensor([0.5]).bfloat16(),
        "kept_ids": m.kept,
    }
    return tensors, {"taps": m.taps(5), "block_size": BLOCK}


def _medusa(m: _Maker) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {
        "tap_norms": m.norm(2, m.hidden),
        "embed_norm.weight": m.norm(m.hidden),
        "in_proj.weight": m.weight(m.hidden, 3 * m.hidden),
        "rates": torch.rand(3, NUM_RANKS, generator=m.generator).sort(dim=1, descending=True).values / 2,
        "kept_ids": m.kept,
    }
    for k in range(3):
        for b in range(2):
            for name in ("up", "down"):
                tensors[f"heads.{k}.{b}.{name}.weight"] = m.weight(m.hidden, m.hidden)
    return tensors, {"taps": [m.layers // 2, m.layers - 1]}


def _small_model(m: _Maker) -> tuple[dict[str, Tensor], dict[str, Any]]:
    hidden, buckets = 16, 4
    llama = {
        "vocab_size": len(m.kept) + buckets,
        "hidden_size": hidden,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    tensors = {
        "model.embed_tokens.weight": m.weight(len(m.kept) + buckets, hidden, gain=4),
        "model.norm.weight": m.norm(hidden),
        "kept_ids": m.kept,
    }
    shapes = {"q": (16, hidden), "k": (8, hidden), "v": (8, hidden), "o": (hidden, 16)}
    for i in range(2):
        layer = f"model.layers.{i}."
        for name, shape in shapes.items():
            tensors[f"{layer}self_attn.{name}_proj.weight"] = m.weight(*shape)
        for name, shape in {"gate": (32, hidden), "up": (32, hidden), "down": (hidden, 32)}.items():
            tensors[f"{layer}mlp.{name}_proj.weight"] = m.weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = m.norm(hidden)
    return tensors, {"llama": llama, "num_buckets": buckets}


def _early_exit(m: _Maker) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return {"norm.weight": m.norm(m.hidden)}, {"exit_layers": 1}


_MAKERS: dict[str, Callable[[_Maker], tuple[dict[str, Tensor], dict[str, Any]]]] = {
    "eagle3": _eagle3,
    "block": _block,
    "medusa": _medusa,
    "small_model": _small_model,
    "early_exit": _early_exit,
}
KINDS = tuple(_MAKERS)


def make(drafter: str, target: Any, seed: int = 0) -> files.Artefact:
    """In memory, as `files.read` gives it."""
    tensors, fields = _MAKERS[drafter](_Maker(target, seed))
    return files.Artefact(
        {"format": files.FORMAT, "drafter": drafter, "target": files.describe_target(target), **fields}, tensors
    )


def write(folder: Path, drafter: str, target: Any, seed: int = 0, **changes: Any) -> Path:
    """On disk, with some fields of its config changed."""
    made = make(drafter, target, seed)
    files.write(folder, {**made.config, **changes}, made.tensors, {"command": "a test"}, "# A test's\n")
    return folder


@functools.cache
def _room() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="outrider-")  # goes with the process


def folder(drafter: str, target: Any, seed: int = 0) -> str:
    """One that is written once a process for targets of this shape."""
    shape = hashlib.sha256(repr((files.describe_target(target), head_size(target))).encode()).hexdigest()[:16]
    path = Path(_room().name) / f"{shape}-{drafter}-{seed}"
    return str(path if path.is_dir() else write(path, drafter, target, seed))


def settings(drafter: str, target: Any) -> dict[str, str]:
    """What an engine's settings need beside the drafter's name: random weights, where it must have some."""
    missing = not set(NEED_WEIGHTS).isdisjoint(drafter.split("+"))
    kind = next((part for part in drafter.split("+") if part in NEED_WEIGHTS), drafter)
    return {"drafter_model": folder(kind, target)} if missing else {}
