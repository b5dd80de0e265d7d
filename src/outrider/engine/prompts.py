"""From what a caller gives (texts, ids, messages) to token ids a model takes, and from ids back to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from outrider.errors import RequestError

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a conversation (`role`, `content`)."""


def is_iterable(value: Any) -> bool:
    """Whether it holds several things: a text, bytes and one message do not."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def items_of(value: Any) -> list[Any]:
    """Its items; an array's or a tensor's as Python's own numbers."""
    return list(value.tolist() if hasattr(value, "tolist") else value)


class Prompts:
    """One model's tokenizer and chat template, with what they refuse.

    Args:
        vocab_size: ids at or above it are no ids of the model.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size

    def many(self, prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
        """A list of prompts, where one or many were given."""
        if not is_iterable(prompts):  # one text, or what `encode` refuses
            return [prompts]  # type: ignore[list-item]
        items = items_of(prompts)
        return [items] if items and isinstance(items[0], (Integral, Mapping)) else items

    def encode(self, prompt: Prompt, raw: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Token ids of a prompt; a text or messages go through the chat template where there is one.

        Args:
            raw: leave a text as it is. tools: functions that the template tells the model of, as JSON schemas.

        Raises:
            RequestError: for an empty prompt, ids outside the vocabulary, messages without a template, or tools that
                the template does not know.
        """
        template = self.tokenizer.chat_template
        if isinstance(prompt, str):
            templated = bool(template) and not raw
            ids = self._apply([{"role": "user", "content": prompt}], tools) if templated else self.tokenize(prompt)
        elif not is_iterable(prompt):
            raise RequestError(f"{prompt!r} is no prompt: give a text, token ids, or a list of messages")
        elif (items := items_of(prompt)) and all(isinstance(message, Mapping) for message in items):
            if not template:
                raise RequestError("this model has no chat template: give the prompt as one text")
            ids = self._apply([dict(message) for message in items], tools)
        else:
            ids = items
        self._check(ids)
        return tuple(map(int, ids))

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text as it is.

        Raises:
            RequestError: for half a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"character {error.start} of a text is half a surrogate pair, which no tokenizer takes: repair the text"
            ) from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones left out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def bad_words(self, bad_words: Sequence[str | tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Texts become the token sequences that say them, at the start of a word and within one."""
        sequences: list[tuple[int, ...]] = []
        for words in bad_words:
            if isinstance(words, str):
                forms = [words, " " + words]
                sequences += [tuple(self.tokenize(form, add_special_tokens=False)) for form in forms]
            else:
                sequences.append(tuple(words))
        return tuple(dict.fromkeys(sequences))

    def _check(self, ids: Sequence[Any]) -> None:
        """Refuse what is no sequence of this model's ids."""
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < self.vocab_size:
                raise RequestError(
                    f"prompt token {token!r} is no id of this model: ids lie in 0 .. {self.vocab_size - 1}"
                )
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        bos = self.tokenizer.bos_token_id
        if bos is not None and list(ids[:2]) == [bos, bos]:
            raise RequestError(
                f"the prompt begins with two BOS tokens (id {bos}), which no model was trained on: "
                "leave the BOS out of the text, or out of the chat template"
            )

    def _apply(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        if tools and "tools" not in str(self.tokenizer.chat_template):
            raise RequestError(
                "the chat template of this model knows no tools: leave tools out, or describe them in a message"
            )
        given = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given)
        except Exception as error:  # a template is a program of the model's authors and may raise anything
            raise RequestError(f"the chat template refused these messages ({error}): check roles and order") from error
        return self.tokenize(text, add_special_tokens=False)
