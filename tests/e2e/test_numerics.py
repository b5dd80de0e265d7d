"""How far each arithmetic lies from Transformers' float32 on real text: the price of packed weights, as a bar."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.config import cache_folder
from outrider.models.batch import BatchBuilder
from outrider.models.loader import load

TEXT = Path(__file__).parents[2] / "LICENSE"
LENGTH = 384

BARS = {"float32": 1e-8, "bfloat16": 3e-4, "packed": 1e-3}
"""Largest mean divergence KL(reference || ours) in nats a token."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BARS)
def test_divergence_and_perplexity_on_real_text(smollm2, dtype):
    target = load(smollm2, dtype=dtype, device="cpu", self_test=False)
    assert target.way == "lean"
    tokens = target.tokenizer(TEXT.read_text()).input_ids[:LENGTH]
    module = AutoModelForCausalLM.from_pretrained(cache_folder() / "models" / smollm2, dtype=torch.float32)
    with torch.inference_mode():
        golden = module(torch.tensor([tokens]), use_cache=False).logits[0, :, : target.vocab_size].log_softmax(-1)
    builder = BatchBuilder(16)
    builder.request(range(1, LENGTH // 16 + 2))
    builder.line(0, tokens, LENGTH)
    pages = target.make_pages(LENGTH + 32)
    ours = target.forward(builder.build(torch.device("cpu")), pages).logits.log_softmax(-1)
    divergence = float((golden.exp() * (golden - ours)).sum(-1).mean())
    assert divergence <= BARS[dtype]
    following = torch.tensor(tokens[1:])[:, None]
    ratio = float((golden[:-1].gather(1, following) - ours[:-1].gather(1, following)).mean().exp())
    assert abs(ratio - 1) < 0.005, "perplexity, ours over the reference's"
