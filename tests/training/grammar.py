"""A tiny target with structure to learn: a Llama taught a random grammar, and replies that it wrote itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 64
END = 2
PROMPT, REPLY = 6, 40
STEPS = 150


def make_target(seed: int = 0, **settings: Any) -> Any:
    """A five-layer Llama after some steps on texts in which two tokens mostly decide the next."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        **settings,
    )
    module = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    rng = np.random.default_rng(seed)
    successors = rng.integers(3, VOCAB, size=(8, VOCAB))
    for done in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - done / STEPS)
        tokens = torch.from_numpy(_texts(rng, successors, 16, PROMPT + REPLY))
        module(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.eval()


def _texts(rng: np.random.Generator, successors: np.ndarray, count: int, length: int) -> np.ndarray:
    """x_t follows from x_{t-1} and the parity class of x_{t-2}, nine times in ten."""
    texts = rng.integers(3, VOCAB, size=(count, length))
    for place in range(2, length):
        ruled = successors[texts[:, place - 2] % 2, texts[:, place - 1]]
        texts[:, place] = np.where(rng.random(count) < 0.9, ruled, texts[:, place])
    return texts


@torch.no_grad()
def write_replies(module: Any, folder: Path, conversations: int = 400, seed: int = 1) -> None:
    """One shard of the target's own replies at temperature 1 to random prompts, of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCAB, (conversations, PROMPT), generator=generator)
    torch.manual_seed(seed)
    texts = module.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=REPLY,
        min_new_tokens=REPLY,
        pad_token_id=0,
    )
    lengths = torch.randint(PROMPT + 8, PROMPT + REPLY + 1, (conversations,), generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.concatenate([text[:length] for text, length in zip(texts.numpy(), lengths.tolist(), strict=True)])
    save_file(
        {
            "tokens": tokens.astype(np.int32),
            "starts": np.concatenate([[0], np.cumsum(lengths.numpy())]).astype(np.int64),
            "replies": np.full(conversations, PROMPT, dtype=np.int64),
        },
        folder / "shard-00000.safetensors",
    )
