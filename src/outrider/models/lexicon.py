"""What the ids of a tokenizer stand for, in bytes, and which ids of two tokenizers stand for the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from outrider.errors import ModelError

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_STRAY = re.compile("([\udc80-\udcff]+)")
"""Bytes that are no UTF-8, as Python's `surrogateescape` shows them."""
_SPACE = "\u2581"
"""How SentencePiece writes a space."""
_PROBE = "a"

Piece = tuple[int, int]
"""An id, and how many bytes of the text it stands for."""
NOBODY = -1
"""The id of a byte that no id stands for."""


class Lexicon:
    """A tokenizer read as a table of bytes: byte-level ones (GPT-2's alphabet) and SentencePiece's.

    A special token stands for no text: it is matched with another special one, by its name or as the one that ends
    texts, and never with tokens that merely spell its name; a text that holds its name is spelled out.

    Attributes:
        stands_for: (V) bytes of each id; None of special tokens, and of ids that nobody has. by_bytes: the other way.
        special: ids of special tokens by name. begin, end: those of the tokens that begin and end texts.
        opening: ids with which the tokenizer itself begins every text. leads: it puts a space there, which is no part
            of the text.

    Raises:
        ModelError: for a tokenizer whose ids do not stand for bytes, or that is not of the `tokenizers` library.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """vocab_size: ids that may be said; those beyond stand for nothing."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"a {type(tokenizer).__name__} does not tell what its ids stand for")
        kinds = {part["type"]: part for part in _parts(backend.decoder)}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_bytes = "ByteFallback" in kinds
        if not self._is_byte_level and not {"ByteFallback", "Metaspace", "Replace"} & kinds.keys():
            raise ModelError("its tokenizer is neither byte-level nor SentencePiece's")
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        self.special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self.begin: int | None = tokenizer.bos_token_id
        self.end: int | None = tokenizer.eos_token_id
        plain = {number: token.content for number, token in added.items() if not token.special}
        barred = set(self.special.values())
        self._alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
        self.stands_for: list[bytes | None] = [None] * vocab_size
        for word, number in backend.get_vocab(with_added_tokens=True).items():
            if number < vocab_size and number not in barred:
                self.stands_for[number] = plain[number].encode() if number in plain else self._bytes(word)
        self.by_bytes = self._first_of_each()
        self.opening = self._opening()
        self.leads = b"".join(self.stands_for[number] or b"" for number in self._ids(_PROBE)).startswith(b" ")

    def spell(self, text: bytes, begins: bool = True) -> list[Piece]:
        """A text as the tokenizer would write it, bytes that are no UTF-8 one by one; `NOBODY` for one that has no id.

        begins: no text stands before it, so that SentencePiece's begins with a space, which counts for no byte. Where
        the tokenizer changes the text (lower case, say), the last piece of a stretch counts for all of its bytes.
        """
        pieces: list[Piece] = []
        for stretch in _STRAY.split(text.decode(errors="surrogateescape")):
            if _STRAY.match(stretch):
                lone = stretch.encode(errors="surrogateescape")
                pieces += [(self.by_bytes.get(bytes([byte]), NOBODY), 1) for byte in lone]
            elif stretch:
                pieces += self._encode(stretch, begins and not pieces)
        return pieces

    def _encode(self, text: str, begins: bool) -> list[Piece]:
        wanted = text.encode()
        found: list[Piece] = []
        # A tokenizer that puts a space before every text gets one that goes on without its own.
        for given in dict.fromkeys((text, text.removeprefix(" "))):
            ids = self._ids(given)
            texts = [self.stands_for[number] or b"" for number in ids]
            sizes, said = [len(text) for text in texts], b"".join(texts)
            if said == wanted:
                return list(zip(ids, sizes, strict=True))
            if said == b" " + wanted:
                found = [(ids[0], sizes[0] - 1), *zip(ids[1:], sizes[1:], strict=True)]
                if begins:
                    break
            elif not found and ids:
                found = [*((number, 0) for number in ids[:-1]), (ids[-1], len(wanted))]
        return found

    def _ids(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = True  # a name of a special token is a text like any other
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return [number for number in ids if number < len(self.stands_for)]

    def _bytes(self, word: str) -> bytes:
        if self._is_byte_level:
            if all(character in self._alphabet for character in word):
                return bytes(self._alphabet[character] for character in word)
            return word.encode()
        if self._has_bytes and (byte := _BYTE.fullmatch(word)):
            return bytes([int(byte[1], 16)])
        return word.replace(_SPACE, " ").encode()

    def _first_of_each(self) -> dict[bytes, int]:
        """The id for each piece of text; of several the one that is no lone byte of SentencePiece's, then the first."""
        found: dict[bytes, int] = {}
        spare: dict[bytes, int] = {}
        lone = {number for word, number in self._backend.get_vocab().items() if self._has_bytes and _BYTE.match(word)}
        for number, text in enumerate(self.stands_for):
            if text:
                (spare if number in lone else found).setdefault(text, number)
        return spare | found

    def _opening(self) -> tuple[int, ...]:
        with_all: list[int] = self._backend.encode(_PROBE, add_special_tokens=True).ids
        bare: list[int] = self._backend.encode(_PROBE, add_special_tokens=False).ids
        for start in range(len(with_all) - len(bare) + 1):
            if with_all[start : start + len(bare)] == bare:
                return tuple(with_all[:start])
        return ()


def shared(target: Lexicon, drafter: Lexicon) -> tuple[Tensor, Tensor]:
    """What both can say: ids of the target, ascending, and the drafter's id of each: (K,) int64 both.

    One drafter's id a target's id, and one target's id a text: where a vocabulary says one thing in two ways, the other
    way is left out. Special tokens meet as `special_pairs` says.
    """
    pairs = {number: drafter.by_bytes[text] for text, number in target.by_bytes.items() if text in drafter.by_bytes}
    pairs |= special_pairs(target, drafter)
    kept = sorted(pairs)
    return torch.tensor(kept, dtype=torch.int64), torch.tensor([pairs[number] for number in kept], dtype=torch.int64)


def special_pairs(target: Lexicon, drafter: Lexicon) -> Mapping[int, int]:
    """The drafter's special id for each special id of the target that it has by name, or that ends texts likewise."""
    pairs = {number: drafter.special[name] for name, number in target.special.items() if name in drafter.special}
    if target.end is not None and drafter.end is not None and drafter.end not in pairs.values():
        pairs.setdefault(target.end, drafter.end)
    sizes = len(target.stands_for), len(drafter.stands_for)
    return {number: other for number, other in pairs.items() if number < sizes[0] and other < sizes[1]}


def first_difference(a: Any, b: Any) -> str | None:
    """The first id that two tokenizers give another token, in words; None where they share their vocabulary.

    Padding of the embeddings does not matter.
    """
    words_a, words_b = ({number: word for word, number in each.get_vocab().items()} for each in (a, b))
    for number in sorted(words_a.keys() | words_b.keys()):
        if words_a.get(number) != words_b.get(number):
            return f"id {number} is {words_a.get(number)!r} in one and {words_b.get(number)!r} in the other"
    return None


def _parts(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of a decoder of the `tokenizers` library."""
    if decoder is None:
        return
    whole = json.loads(decoder.__getstate__())
    yield from whole["decoders"] if whole["type"] == "Sequence" else [whole]
