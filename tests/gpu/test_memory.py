"""On a GPU: graphs give the bits of eager passes at every batch and depth, and the plan of memory is an upper bound."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from outrider import LLM, EngineConfig, SamplingParams
from outrider.cli import main
from outrider.engine.resolve import equip
from outrider.measure.random_rows import RandomModel, random_target
from outrider.measure.start import measure_starts
from outrider.record import Laps
from outrider.request import Request
from tests.models.tiny import make_module, make_tokenizer

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
ROOM = {"max_position_embeddings": 600}
LARGE = RandomModel(
    "a 1B with a vocabulary of 128k",
    "llama",
    {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 262_144,
    },
    1024,
)
"""Full contexts are so long that slots take all the memory there is."""
LAWS = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 1.0, "min_p": 0.02, "logprobs": 5},
    {"prompt_logprobs": 2},
)
CYCLES = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    make_module("llama", torch.bfloat16, **SHAPE, **ROOM).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_replays_equal_eager_passes_at_every_batch_and_depth(tmp_path, name):
    """Ragged prompts and guesses, one request more than run at once; the lean way and the module's."""
    make_module(name, torch.bfloat16, **ROOM).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), drafter="suffix", device="cuda", max_context=300, max_requests=8, prefix_cache=False)
    pool = llm.engine.target.kernels.graph_pool
    for batch in range(1, 10):
        prompts = [[3 + i, 5, 7 + i] * (1 + i % 4) for i in range(batch)]
        params = [SamplingParams(seed=i, temperature=(0.0, 1.0)[i % 2], max_tokens=16 + i) for i in range(batch)]
        for depth in (1, 4, 8):
            with llm.always_guessing(depth):
                replayed = [result.token_ids for result in llm.generate(prompts, params)]
                with pool.closed():
                    eager = [result.token_ids for result in llm.generate(prompts, params)]
            assert replayed == eager, (batch, depth)
    assert llm.resolved.notes == ()
    assert 0 < pool.held <= pool.limit


def test_the_plan_holds_for_a_thousand_cycles_at_the_largest_of_everything():
    target = random_target(LARGE, GPU)
    gc.collect()
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_reserved()
    config = EngineConfig(
        model=LARGE.what, drafter="early_exit", memory_share=0.95, max_requests=64, depth=8, width=4, max_rows=512
    )
    engine, resolved = equip(config, target, Laps())
    plan = resolved.memory
    assert plan.note is None
    generator = torch.Generator().manual_seed(0)
    number, most, least = 0, 0, torch.cuda.mem_get_info(GPU)[0]
    with engine.always_guessing(7, 1):  # 64 roots and as many chains of 7 fill the widest pass
        for _ in range(CYCLES):
            while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 64:
                length = int(torch.randint(1, 1500, (1,), generator=generator))
                prompt = tuple(torch.randint(3, target.vocab_size, (length,), generator=generator).tolist())
                params = SamplingParams(max_tokens=200, **LAWS[number % len(LAWS)])
                engine.add(Request(number, prompt, params, number, limit=200))
                number += 1
            engine.step()
            most = max(most, torch.cuda.memory_reserved() - weights)  # PyTorch keeps what a cycle took
            least = min(least, torch.cuda.mem_get_info(GPU)[0])
    assert most <= plan.taken + plan.margin, resolved.memory.table()
    assert least >= 0.05 * torch.cuda.mem_get_info(GPU)[1] - plan.margin
    pool = target.kernels.graph_pool
    assert 0 < pool.held <= pool.limit == plan.graphs
    print(f"planned {plan.taken / 2**20:,.0f} MiB, held at most {most / 2**20:,.0f} MiB; {plan.sentence()}")


def test_doctor_tells_the_way_the_width_and_the_tiles(folder, capsys):
    assert main(["doctor", folder, "--device", "cuda", "--limit", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["gpu_kernels"]["tiles"] == "equal in every bit"
    assert set(found["gpu_kernels"]["self_test"].values()) == {"passed"}
    assert (found["model"]["way"], found["model"]["fixed_width"]) == ("lean", None)
    assert found["model"]["memory"]["graphs"] > 0
    assert found["model"]["notes"] == []


def test_a_warm_start_compiles_nothing(folder):
    cold, warm = measure_starts(folder, {"drafter": "none", "device": "cuda"}, [5, 6, 7])
    assert (cold.error, warm.error) == (None, None)
    assert warm.parts["kernels"] < cold.parts["kernels"] / 2
    print(cold, warm, sep="\n")
