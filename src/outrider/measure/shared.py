"""What sharing a target brings: plain and speculative decoding of one shape by one card or several, weights random.

Every rank makes its own part on its own device, so that no machine ever holds more of a model than its cards do. What
such a model says means nothing, and guesses are kept by a schedule (`measure/synthetic`): only times are true.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from outrider.drafters.eagle3 import Eagle3
from outrider.kernels import select
from outrider.kernels.base import Kernels, Linear
from outrider.measure.child import ChildError
from outrider.measure.random_rows import Words
from outrider.models.heads import files
from outrider.models.heads.layer import head_size
from outrider.models.lean import LeanModel
from outrider.models.lean_spec import LeanSpec, rotary_tables, spec_of
from outrider.models.loader import assemble
from outrider.models.ranks.group import Ranks
from outrider.models.ranks.lead import Lead
from outrider.models.ranks.part import Part
from outrider.models.shapes import DRAFT_VOCABULARY, LLAMA_8B, LLAMA_70B, Shape
from outrider.models.target import Target
from outrider.models.widen import SPREAD

SHAPES = {
    "8b": LLAMA_8B,
    "70b": LLAMA_70B,
    "tiny": Shape(64, 2, 4, 2, 16, 96, 320),
}
"""By name; the last one is for tests."""
POSITIONS = 2048
TAPS = 3
PATIENCE = 300.0
"""Seconds of one job."""
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"device": "cuda", "tokens": 192, "depth": 5, "tau": 4.0, "buffer": None}
)


class RandomWeights:
    """This rank's weights of a spec, made where they are used; see `lean_weights.Weights`."""

    def __init__(self, spec: LeanSpec, kernels: Kernels, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        self._shapes = spec.shapes()
        self._kernels = kernels
        self._dtype, self._device = dtype, device
        self._rank = rank

    def linears(self, names: Sequence[str]) -> list[Linear]:
        """Always one. What every rank has whole is the same on all of them."""
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        rank = self._rank if ".layers." in names[0] else 0
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{names[0]} of {rank}".encode()))
        whole = torch.empty(sum(rows for rows, _ in shapes), shapes[0][1], dtype=self._dtype, device=self._device)
        return [self._kernels.pack(whole.normal_(0.0, SPREAD, generator=generator))]

    def vector(self, name: str) -> Tensor:
        return torch.ones(self._shapes[f"{name}.weight"], device=self._device)


@torch.inference_mode()
def random_part(name: str, device: torch.device, ranks: Ranks | None) -> Part:
    """This rank's part of a shape (None: all of it), bfloat16 on a GPU and float32 on a CPU."""
    shape, dtype = SHAPES[name], torch.bfloat16 if device.type == "cuda" else torch.float32
    config = AutoConfig.for_model(
        "llama",
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab_size,
        max_position_embeddings=POSITIONS,
    )
    kernels, spec = select("auto", device), spec_of(config)
    assert spec is not None
    own = spec if ranks is None else spec.part(ranks.size)
    rotary = importlib.import_module("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding(config)
    tables = rotary_tables(rotary.to(device), POSITIONS, device)
    weights = RandomWeights(own, kernels, dtype, device, ranks.rank if ranks else 0)
    body = LeanModel(own, weights, kernels, tables, ranks)
    told = str(dtype).removeprefix("torch.")
    return Part(
        f"random weights, {name}", body, kernels, told, Words(shape.vocab_size), config, GenerationConfig(), None, None
    )


def random_target(part: Part, device: torch.device, ranks: Ranks | None, number: int) -> Target:
    """The target that rank 0 leads, or has alone. number: of the part, on every rank."""
    target = assemble(
        part.name, part.body, part.dtype, device, part.kernels, part.tokenizer, part.config, part.generation
    )
    if ranks is not None:
        target.lead = Lead(ranks, number, part.kernels)
        target.notes = [*target.notes, *([ranks.note] if ranks.note else [])]
    return target


def read_bytes(name: str, itemsize: int) -> int:
    """Of the weights that one pass reads, on all cards together: all but the rows of the embedding."""
    shape = SHAPES[name]
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim  # q and o, k and v
    layer = shape.hidden * (heads + 3 * shape.intermediate)
    return itemsize * (shape.num_layers * layer + shape.vocab_size * shape.hidden)


def measure_shared(
    shape: str, cards: int, told: Callable[[str], None] = print, **settings: Any
) -> dict[str, dict[str, Any]]:
    """Figures by what they are of, from processes of their own, a rank each.

    Args:
        told: each figure, as soon as it is there. settings: other fields of a job than these; see `shared_run`.

    Raises:
        ChildError: if a process died or took longer than `PATIENCE`.
    """
    job = {"shape": shape, "cards": cards, **DEFAULTS, **settings}
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as room:
        file, notes = Path(room) / "job.json", Path(room) / "stderr"
        file.write_text(json.dumps(job))
        ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(cards), "-m"] if cards > 1 else []
        command = [sys.executable, "-m", *ranks, "outrider.measure.shared_run", str(file)]
        with notes.open("w") as errors, subprocess.Popen(command, stdout=errors, stderr=errors) as ran:
            until, is_over = time.monotonic() + PATIENCE, False
            while not is_over:
                time.sleep(0.2)
                is_over = ran.poll() is not None or time.monotonic() > until
                for figures in _written(file.with_suffix(".out"))[len(found) :]:
                    told(f"{shape}, {cards} cards: {json.dumps(figures)}")
                    found[figures["what"]] = figures
            ran.terminate()  # `torchrun` ends its ranks then
        if ran.returncode:
            raise ChildError(f"{shape} on {cards} cards: {notes.read_text()[-2000:]}")
    return found


def _written(file: Path) -> list[dict[str, Any]]:
    """All lines until now that are whole."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@torch.inference_mode()
def write_eagle3(folder: Path, target: Target) -> Path:
    """A head of the published form for this target, with random weights: a layer as large as the target's own."""
    shape, generator = target.config, torch.Generator(target.device).manual_seed(0)
    hidden, inner, words = shape.hidden_size, shape.intermediate_size, min(DRAFT_VOCABULARY, target.vocab_size)
    queries, keys = (count * head_size(target) for count in (shape.num_attention_heads, shape.num_key_value_heads))
    sizes = {
        "fc": (hidden, TAPS * hidden),
        "q_proj": (queries, 2 * hidden),
        "k_proj": (keys, 2 * hidden),
        "v_proj": (keys, 2 * hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "head": (words, hidden),
    }
    tensors = {
        f"{name}.weight": torch.empty(size, dtype=torch.bfloat16, device=target.device)
        .normal_(0.0, SPREAD, generator=generator)
        .cpu()
        for name, size in sizes.items()
    }
    norms = ("embed_norm.weight", "feature_norm.weight", "post_norm.weight", "final_norm.weight")
    tensors |= {name: torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    tensors["tap_norms"] = torch.ones(TAPS, hidden, dtype=torch.bfloat16)
    tensors["kept_ids"] = torch.arange(words, dtype=torch.int32)
    taps = [round(i * (target.num_layers - 1) / (TAPS - 1)) for i in range(TAPS)]
    config = {"drafter": Eagle3.name, "target": files.describe_target(target), "taps": taps}
    files.write(folder, config, tensors, {"weights": "random"}, "# random weights\n")
    return folder
