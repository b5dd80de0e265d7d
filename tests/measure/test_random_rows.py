"""Rows of random weights: tiny shapes of every kind end to end, what a pass must read of them, and what is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from outrider.measure import random_rows
from outrider.measure.passes import key_bytes, streamed_bytes
from outrider.measure.random_rows import MODELS, NO_MEANING, RandomModel, chosen, measure_random, random_target
from outrider.measure.report_page import _random
from outrider.models.lean_spec import spec_of
from tests.models.tiny import BASE, MOE

CPU = torch.device("cpu")
TINY = {
    "window": RandomModel("tiny window", "mistral", {**BASE, "sliding_window": 8}, 40),
    "long": RandomModel("tiny long", "llama", {**BASE, "max_position_embeddings": 2048}, 1500),
    "experts": RandomModel("tiny experts", "qwen3_moe", {**BASE, **MOE, "head_dim": 8}, 20),
}


@pytest.fixture(scope="module")
def rows():
    return {row["name"]: row for row in measure_random(TINY, CPU, 1e10, max_tokens=4, repeats=2)}


def test_every_kind_has_a_row_by_the_way_that_serves_it(rows):
    assert [row["way"] for row in rows.values()] == ["lean", "lean", "module"]
    assert rows["experts"]["fixed_width"] == 16
    for name, row in rows.items():
        assert "error" not in row
        assert row["context"] == TINY[name].context
        assert [(p["requests"], p["rows"]) for p in row["passes"]] == [(1, 1), (1, 16)]
        assert all(p["share_of_limit"] > 0 for p in row["passes"])
        assert row["plain"]["cycles"] == 3
        assert row["plain"]["tau"] == 1
        assert row["share_of_limit"] > 0


def test_the_page_says_that_they_mean_nothing_and_what_failed(rows):
    failed = {"name": "large", "what": "a large one", "error": "out of memory"}
    page = "\n".join(_random({"random": [*rows.values(), failed]}))
    assert NO_MEANING in page
    assert page.count("| tiny") == 3
    assert "- a large one: out of memory" in page
    assert list(_random({"random": []})) == []


def test_a_model_that_cannot_be_measured_is_told_of_and_the_next_one_is():
    short = replace(TINY["window"], context=95)
    told = measure_random({"short": short, "window": TINY["window"]}, CPU, 1e10, max_tokens=4, repeats=1)
    assert "111 positions exceed the model's 96" in told[0]["error"]
    assert "error" not in told[1]


def test_running_out_of_memory_ends_one_row(monkeypatch):
    def fail(model, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB\nmore")

    monkeypatch.setattr(random_rows, "random_target", fail)
    (row,) = measure_random({"window": TINY["window"]}, CPU, 1e10)
    assert row["error"] == "CUDA out of memory. Tried to allocate 20.00 MiB"


def test_a_window_bounds_the_keys_that_are_read():
    target = random_target(TINY["window"], CPU)
    slot = 2 * 2 * 8 * 4  # keys and values of two heads of eight, in float32
    assert key_bytes(target, 5) == 3 * 5 * slot
    assert key_bytes(target, 40) == 3 * 8 * slot


def test_experts_that_no_row_chooses_are_not_read():
    target = random_target(TINY["experts"], CPU)
    expert = 3 * 16 * 32 * 4  # gate, up and down
    every, layers, count, active = streamed_bytes(target), 3, 4, 2
    assert every - streamed_bytes(target, 1) == layers * (count - active) * expert
    assert every - streamed_bytes(target, 2) == layers * expert  # (1 - 2/4)^2 of four
    assert streamed_bytes(random_target(TINY["long"], CPU), 1) == streamed_bytes(random_target(TINY["long"], CPU))


def test_the_shapes_are_those_of_the_models_they_are_named_after():
    """Sizes from the models' own cards: 7.2, 8.0 and 30.5 billion parameters, of the last half of the layers."""
    counts = {}
    for name, model in MODELS.items():
        config = AutoConfig.for_model(model.model_type, **model.sizes)
        spec = spec_of(config)
        if spec is not None:
            counts[name] = sum(torch.Size(shape).numel() for shape in spec.shapes().values())
            assert model.context + 64 < spec.max_positions
        else:
            layer = 3 * 128 * 768 * 2048 + 128 * 2048 + 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 2048 + 2 * 128
            assert (config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok) == (2048, 768, 8)
            counts[name] = config.num_hidden_layers * layer + 2 * config.vocab_size * 2048 + 2048
    assert counts["window"] == pytest.approx(7.24e9, rel=0.01)
    assert counts["long"] == pytest.approx(8.03e9, rel=0.01)
    assert counts["experts"] == pytest.approx((30.53e9 + 2 * 151936 * 2048) / 2, rel=0.01)


def test_all_are_chosen_by_one_word():
    assert list(chosen(["all"])) == list(MODELS)
    assert list(chosen(["long", "window", "long"])) == ["long", "window"]
    assert chosen([]) == {}
