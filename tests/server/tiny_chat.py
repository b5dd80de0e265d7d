"""A tiny random model that speaks bytes: its texts break characters, and it has a chat template with tools."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models.tiny import make_module

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<im_start>{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<im_end>{% endfor %}{% if add_generation_prompt %}<im_start>assistant: {% endif %}"
)
MERGES = [("a", "b"), ("ab", "c"), ("e", "r"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©")]
SPECIAL = ["<im_start>", "<im_end>"]


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2's: 256 bytes, a few merges, and two special tokens, the second of which ends a text."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[1], chat_template=TEMPLATE)


def save_tiny_chat(folder: Path, **settings: int) -> str:
    """The model and its tokenizer in a folder."""
    tokenizer = make_byte_tokenizer()
    ends = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, "num_hidden_layers": 2}
    make_module("llama", **{**size, **ends, **settings}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
