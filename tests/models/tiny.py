"""Tiny random models of many architectures, built offline, and targets made of them."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from outrider.kernels import select
from outrider.models.loader import assemble
from outrider.models.module import ModuleModel
from outrider.models.target import Target

VOCAB = 128
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 48,
    "factor": 2.0,
}
# Windows are shorter than the texts of the tests, so that a window that is not honoured shows.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama_dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": 8}),
    "phi3_longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48}),
    "gpt2": ("gpt2", {"n_inner": 64}),
    "gpt_neox": ("gpt_neox", {}),
    "biogpt": ("biogpt", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 8}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "glm4": ("glm4", {"head_dim": 8}),
    "exaone4": ("exaone4", {"sliding_window": 8}),
    "mixtral": ("mixtral", MOE),
    "qwen3_moe": ("qwen3_moe", {**MOE, "head_dim": 8}),
    "gpt_oss": ("gpt_oss", {**MOE, "head_dim": 8, "sliding_window": 8}),
    "deepseek_v3": ("deepseek_v3", MLA),
}


def make_module(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A random module whose logits are far from flat, with eager attention."""
    model_type, overrides = ARCHITECTURES.get(name, (name, {}))
    config = AutoConfig.for_model(model_type, **{**BASE, **overrides, **settings})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() < 2:  # norms, biases and sinks start as ones and zeros, which would hide a lost one
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4)
    return module.to(dtype).eval()


def make_tokenizer(size: int = VOCAB) -> PreTrainedTokenizerFast:
    """One word an id: `w0`, `w1`, ..."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2")


def make_target(module: Any, tokenizer: Any = None) -> Target:
    """The module on the module way, with kernels that are there on every machine."""
    kernels = select("plain", torch.device("cpu"))
    dtype = str(module.dtype).removeprefix("torch.")
    return assemble(
        "tiny",
        ModuleModel(module, kernels),
        dtype,
        torch.device("cpu"),
        kernels,
        tokenizer or make_tokenizer(),
        module.config,
        module.generation_config,
    )
