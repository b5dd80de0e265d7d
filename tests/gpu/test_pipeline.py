"""On a GPU: cycles in the air say what lockstep says, as graphs, and what is neither target nor drafter is short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.measure.flight import measure_shape
from outrider.request import SamplingParams
from tests import artefacts
from tests.models.tiny import make_module, make_target, make_tokenizer

pytestmark = pytest.mark.gpu
ON_DEVICE = ["small_model", "early_exit", "eagle3", "medusa", "block"]
PROMPTS = [tuple(range(5 + i, 12 + 2 * i)) for i in range(7)]
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128_256,
    "max_position_embeddings": 2048,
}
"""Few layers, the vocabulary of an 8B: what a cycle does beside target and drafter depends on nothing else."""
PARTS = ("cycle", "draft", "target", "rest", "device", "rest_on_device")
REST, WARPED = 0.3e-3, 0.6e-3
"""Seconds: the bars of issue 4 for all else in a cycle, where nothing warps, and with a nucleus and penalties."""


def written(path: Path, shape: dict[str, Any]) -> str:
    make_module("llama", **shape).save_pretrained(path)
    make_tokenizer(shape.get("vocab_size", 128)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    return written(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> str:
    return written(tmp_path_factory.mktemp("large"), LARGE)


def opened(folder: str, shape: dict[str, Any], drafter: str, **own: Any) -> LLM:
    tokenizer = make_tokenizer(shape.get("vocab_size", 128))
    target = make_target(make_module("llama", **shape), tokenizer)
    settings = artefacts.settings(drafter, target) if drafter != "none" else {}
    llm = LLM(folder, device="cuda", drafter=drafter, num_slots=4096, self_test=False, **settings, **own)
    llm.engine.strict = True
    return llm


LAWS = [
    {"top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"top_k": 20, "min_p": 0.02, "frequency_penalty": 0.5},
    {},
]


def said(
    llm: LLM, prompts: list[tuple[int, ...]], temperature: float, depth: int, laws: list[dict[str, float]] | None = None
) -> list[tuple[Any, ...]]:
    """laws: the further fields of each prompt, in turns."""
    common = {"max_tokens": 40, "temperature": temperature, "seed": 5, "ignore_eos": True}
    given = laws or [{}]
    params = [SamplingParams(**common, **given[n % len(given)]) for n in range(len(prompts))]
    with llm.always_guessing(depth):
        results = llm.generate(prompts, params, raw=True)
    return [r.token_ids for r in results]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", ["none", *ON_DEVICE])
@pytest.mark.parametrize("width", [1, 4])
def test_cycles_in_the_air_say_what_lockstep_says(small, dtype, drafter, width):
    lockstep, flying = (
        opened(small, SMALL, drafter, dtype=dtype, width=width, in_flight=in_flight) for in_flight in (0, 2)
    )
    for temperature in (0.0, 1.0):
        for prompts in (PROMPTS[:1], PROMPTS):
            for depth in (1, 5):
                for laws in (None, LAWS):
                    found = [said(llm, prompts, temperature, depth, laws) for llm in (lockstep, flying)]
                    assert found[0] == found[1], (temperature, len(prompts), depth, laws)
    pipeline = flying.engine.pipeline
    assert pipeline.note is None, "a cycle was not captured"
    assert pipeline._cycle._graphs._captured, "nothing flew"


@pytest.mark.parametrize(("temperature", "law", "bar"), [(0.0, {}, REST), (1.0, {}, REST), (1.0, LAWS[0], WARPED)])
@pytest.mark.parametrize(("drafter", "depth", "width", "nodes"), [("eagle3", 5, 1, 5), ("eagle3", 8, 8, 64)])
def test_all_else_in_a_cycle_keeps_its_bar(large, temperature, law, bar, drafter, depth, width, nodes):
    llm = opened(large, LARGE, drafter, dtype="bfloat16", in_flight=2, width=width, nodes=nodes)
    params = SamplingParams(temperature=temperature, seed=1, ignore_eos=True, **law)
    found = measure_shape(llm.engine, PROMPTS[:1], params, depth, width, repeats=60)
    print(f"\n  T = {temperature}, {law}, in ms: " + ", ".join(f"{name} {1e3 * found[name]:.3f}" for name in PARTS))
    assert (found["levels"], found["nodes"]) == (depth, nodes)
    assert llm.engine.pipeline.note is None
    assert found["rest_on_device"] <= bar
    assert found["rest"] <= bar
