"""A model in several files: read and packed without ever being there twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.models.loader import load
from tests.models.tiny import BASE, make_tokenizer

SHARD = 16 << 20
OWN = 16 << 20
"""Bytes that loading takes for itself."""
MEMORY = Path("/proc/self/status")


def memory(name: str) -> int:
    """Bytes of this process, as the kernel counts them: `VmRSS` now, `VmHWM` at most since `forget`."""
    (line,) = (line for line in MEMORY.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shards")
    sizes = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    config = AutoConfig.for_model("llama", **{**BASE, **sizes, "num_attention_heads": 8})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(made, max_shard_size=SHARD)
    make_tokenizer().save_pretrained(made)
    return made


@pytest.mark.skipif(not MEMORY.exists(), reason="the kernel does not say how much memory a process has taken")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_in_shards_is_never_there_twice(folder: Path, dtype: str) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 5
    load(str(folder), dtype=dtype)  # what is imported, compiled and set up once
    forget()
    before = memory("VmRSS")
    target = load(str(folder), dtype=dtype)
    taken = memory("VmHWM") - before
    assert target.way == "lean"
    assert target.nbytes > 5 * SHARD
    assert taken < target.nbytes + SHARD + OWN
