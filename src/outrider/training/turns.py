"""Where a user's words stand in a chat template, and how texts and seeds are told apart."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.llm import LLM

Messages = list[dict[str, str]]


def opening(llm: LLM, messages: Messages) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a conversation up to where the user's next words would begin, and the tokens that end such words.

    Raises:
        ConfigError: if the model has no chat template, or one in which a user's words cannot be found again.
    """
    mark = "outrider-user-words"
    if not llm.tokenizer.chat_template:
        raise ConfigError("this model has no chat template to make up a user's words from: give prompts")
    try:
        text = llm.tokenizer.apply_chat_template([*messages, {"role": "user", "content": mark}], tokenize=False)
    except Exception as error:  # a template is a program of the model's authors and may raise anything
        raise ConfigError(f"the chat template refused a user's turn ({error}): give prompts") from error
    before, found, after = text.partition(mark)
    if not found or not before:
        raise ConfigError("the chat template hides where a user's words begin: give prompts")
    encode = llm.tokenizer.encode
    following = encode(after, add_special_tokens=False)[:1]
    special = set(llm.tokenizer.all_special_ids)
    return tuple(encode(before, add_special_tokens=False)), tuple(token for token in following if token in special)


def digest(content: str | Messages) -> int:
    """63 bits of a prompt, whatever its case and spaces."""
    text = content if isinstance(content, str) else "\0".join(message["content"] for message in content)
    return bits_of(" ".join(text.lower().split()))


def bits_of(text: str) -> int:
    """63 bits that look random and are always the same."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) >> 1
