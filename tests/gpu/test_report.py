"""On a GPU: a twin is built on the device and says what its original says; a whole report comes out of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.measure.bandwidth import measure_bandwidth
from outrider.measure.cycle import LOCKSTEP
from outrider.measure.flight import IN_FLIGHT
from outrider.measure.gpu_report import Reporter, Scope
from outrider.measure.synthetic import NOT_VALID
from tests import artefacts
from tests.models.tiny import make_module, make_target, make_tokenizer

pytestmark = pytest.mark.gpu
PROMPTS = [(5, 6, 7), (9, 8, 7, 6, 5), tuple(range(10, 30))]
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 600,
}
"""Heads of 64, and of 128 in the twin, as real models have."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    make_module("llama", **SHAPE).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def opened(folder: str, **own: Any) -> LLM:
    settings: dict[str, Any] = {"num_slots": 1024, "device": "cuda", "drafter": "none", **own}
    if settings["drafter"] == "eagle3":
        settings["self_test"] = False  # a head with random weights guesses by chance, which the start would refuse
        settings["drafter_model"] = artefacts.folder("eagle3", make_target(make_module("llama", **SHAPE)))
    return LLM(folder, **settings)


def test_the_read_limit_is_that_of_a_card():
    found = measure_bandwidth(torch.device("cuda"))
    assert 3e11 < found.bytes_per_second < 2e13


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_report(folder, dtype):
    scope = Scope(
        drafters=("ngram", "eagle3"),
        prompts=PROMPTS,
        together=(1, 3),
        max_tokens=24,
        context=32,
        widths=(1, 4, 16),
        batches=(2, 8),
        tau=2.5,
        depth=3,
        peers=dtype == "bfloat16",
    )
    found = Reporter(lambda own: opened(folder, **{"widen": "2x", "dtype": dtype, **own}), scope).run()
    assert found["resolved"]["exactness"] == "seed"
    rows = found["speculative"]
    assert not [row for row in rows if "error" in row]
    assert all(row["differing_texts"] == 0 for row in rows if not row["synthetic"])
    assert any(row["synthetic"] == NOT_VALID for row in rows)
    assert all(row["cycle"] > 0 for row in rows)
    flown = [row for row in [*found["plain"], *rows, *found["shapes"]] if row.get("way", IN_FLIGHT) == IN_FLIGHT]
    assert {row["law"] for row in flown} == {"T=0", "T=1"}
    assert {row["drafter"] for row in flown} == {"none", "eagle3"}
    assert not [row for row in found["shapes"] if "error" in row]
    assert all(row["device"] > row["target"] > 0 for row in flown)
    assert all(row["way"] == LOCKSTEP for row in rows if row["drafter"] == "ngram")
    assert dtype == "bfloat16" or found["twin"]["differing"] == 0
