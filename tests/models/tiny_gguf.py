"""A tiny Llama in a GGUF file, quantised, with its tokenizer; and the weights that must come out of it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.models.tiny import make_module

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS = 64, 4, 2, 96, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "Ġ a", "h e", "l l", "he ll", "hell o", "Ġ 1"]
TOKENS = [*SPECIALS, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores q and k with the two halves of every rotary pair side by side (convert_hf_to_gguf.py)."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_model(path: Path, kind: Kind = Kind.Q4_1) -> dict[str, Tensor]:
    """Write the file -> what its weights are in Transformers' order, by the `gguf` package's own arithmetic."""
    module = make_module(
        "llama",
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        tie_word_embeddings=True,
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(96)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    expected = {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, parameter in module.named_parameters():
        weight = parameter.detach().numpy()
        stem = name.removesuffix(".weight")
        stored_as = Kind.F32 if weight.ndim == 1 else Kind.Q8_0 if "embed" in name else kind
        # Blocks lie within a row, so the order of rows changes no value.
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(stem.rpartition(".")[2])
        stored = gguf.quantize(permuted(weight, heads) if heads else weight, stored_as)
        writer.add_tensor(names.get_name(stem) + ".weight", stored, raw_dtype=stored_as)
        expected[name] = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, stored_as), stored_as).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
