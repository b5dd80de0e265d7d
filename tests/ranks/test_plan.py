"""Transformers' plans, carried out: all ranks' parts together say what the whole module says; the rest is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LLM
from outrider.errors import ConfigError, ModelError
from outrider.models import checks
from outrider.models.checks import Source
from outrider.models.ranks.plan import shard
from outrider.models.ranks.read import read_part
from tests.models.tiny import make_module

PLANNED = ["llama_bias", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3", "phi3", "gpt_neox", "olmo2", "starcoder2"]
PLANNED += ["granite", "cohere2", "glm4", "exaone4", "phi"]


class Threads:
    """Ranks that are threads of this process, with the sums of `Ranks` by their definition."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.board: list[Any] = [None] * size


class Thread:
    def __init__(self, rank: int, ranks: Threads) -> None:
        self.rank, self.size, self.leads, self._ranks = rank, ranks.size, rank == 0, ranks

    def sum(self, partial: Tensor) -> Tensor:
        return sum(part.float() for part in self._all(partial)).to(partial.dtype)

    def columns(self, part: Tensor) -> Tensor:
        return torch.cat(self._all(part), dim=-1)

    def _all(self, part: Tensor) -> list[Tensor]:
        self._ranks.board[self.rank] = part
        self._ranks.barrier.wait()
        found = list(self._ranks.board)
        self._ranks.barrier.wait()
        return found


def together(size: int, run: Callable[[Any], Any]) -> list[Any]:
    ranks = Threads(size)
    with ThreadPoolExecutor(size) as pool:
        return [done.result() for done in [pool.submit(run, Thread(rank, ranks)) for rank in range(size)]]


@pytest.mark.parametrize("name", PLANNED)
def test_the_parts_say_what_the_whole_says(name: str) -> None:
    """The whole is Transformers' own module, which knows nothing of parts."""
    tokens = torch.arange(3, 13)[None]
    whole = make_module(name, num_attention_heads=4, num_key_value_heads=4)
    with torch.inference_mode():
        expected = whole(tokens).logits
    counts = [sum(p.numel() for p in whole.parameters())]
    for size in (2, 4):
        modules = [make_module(name, num_attention_heads=4, num_key_value_heads=4) for _ in range(size)]

        def run(rank: Any, modules: list[Any] = modules) -> Tensor:
            module = modules[rank.rank]
            shard(module, rank)
            with torch.inference_mode():
                return module(tokens).logits

        for logits in together(size, run):
            assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
        counts.append(sum(p.numel() for p in modules[0].parameters()))
    assert counts[0] > counts[1] > counts[2], "nothing was cut off"


@pytest.mark.parametrize("name", ["llama_bias", "qwen3", "smollm3", "gemma2", "phi3"])
def test_a_part_that_is_read_alone_is_the_part_of_the_whole(tmp_path, name: str) -> None:
    """Every bit of it, and of what it says; the rotary tables and what else no file holds included."""
    made = make_module(name, torch.bfloat16, num_attention_heads=4, num_key_value_heads=4)
    made.generation_config.eos_token_id = [2, 7]
    made.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    source = Source("tiny", tmp_path, None)
    config, tokens = checks.read_config(source), torch.arange(3, 13)[None]

    ranks = Threads(2)
    parts = [read_part(source, config, torch.bfloat16, Thread(rank, ranks)) for rank in range(2)]
    wholes = [checks.read_module(source, config, torch.bfloat16, torch.device("cpu")) for _ in range(2)]

    def said(module: Any) -> Tensor:
        with torch.inference_mode():
            return module(tokens).logits

    def cut(rank: Any) -> Tensor:
        shard(wholes[rank.rank], rank)
        return said(wholes[rank.rank])

    with ThreadPoolExecutor(2) as pool:
        logits = list(pool.map(said, parts))
    for part, whole, ours, theirs in zip(parts, wholes, logits, together(2, cut), strict=True):
        assert torch.equal(ours, theirs)
        state, other = part.state_dict(), whole.state_dict()
        assert state.keys() == other.keys()
        assert all(torch.equal(state[key], other[key]) for key in state)
        assert part.generation_config.eos_token_id == [2, 7]


def test_tensors_of_other_names_are_left_to_transformers(tmp_path) -> None:
    made = make_module("llama", num_key_value_heads=4)
    made.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.W_pack"] = weights.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = Source("tiny", tmp_path, None)
    assert read_part(source, checks.read_config(source), torch.float32, Thread(0, Threads(2))) is None


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("gpt2", 2, "GPT2LMHeadModel has no tensor-parallel plan"),
        ("mixtral", 2, "is not served: run it without"),
        ("gpt_oss", 2, "has no tensor-parallel plan"),
        ("llama", 3, "tensor_parallel=3 does not divide the 4 attention heads and 2 key-value heads .*: choose 2"),
        ("llama", 4, "tensor_parallel=4 does not divide the 4 attention heads and 2 key-value heads .*: choose 2"),
        ("phi3", 5, "tensor_parallel=5 does not divide the 32 channels of .*o_proj"),
    ],
)
def test_what_a_plan_cannot_cut_is_refused(name: str, size: int, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        shard(make_module(name), Thread(0, Threads(size)))


def test_without_torchrun_the_command_is_named(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["/bin/outrider", "generate", "m", "two words", "--tensor-parallel", "2"])
    said = "run `torchrun --nproc-per-node 2 -m outrider generate m 'two words' --tensor-parallel 2`"
    with pytest.raises(ConfigError) as caught:
        LLM("m", tensor_parallel=2)
    assert str(caught.value).endswith(said)
    monkeypatch.setattr("sys.argv", ["mine.py"])
    with pytest.raises(ConfigError, match=r"run `torchrun --nproc-per-node 4 mine\.py`"):
        LLM("m", tensor_parallel=4)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="tensor_parallel=4 and torchrun started 2 processes"):
        LLM("m", tensor_parallel=4)
