"""Tokenizers that cut one text in different ways, and a toy drafter that knows the toy's law in words of its own."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The river Loire is the longest river of France, and it ends in the Atlantic Ocean.",
    "A small model guesses the next words; the large one says whether they are right.",
    "Der Fluss ist lang, und die Stra\u00dfe f\u00fchrt \u00fcber die Br\u00fccke.",
    "def step(self):\n    return [row for row in self.rows if row.length > 16]\n",
    "Numbers such as 1, 16, 1984 and 65536 are cut into pieces, too.",
    "\u6cb3\u5ddd\u548c\u5927\u6d77\u3002 \u6cb3\u6d41\u5165\u6d77\u3002",
]


@functools.cache
def byte_level(size: int = 400, name: str = "<|end|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2's, with one special token and without one that begins a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, special_tokens=[name])
    tokenizer.train_from_iterator(CORPUS, trained)
    tokenizer.add_tokens(["</s>"])  # an ordinary word that spells another tokenizer's special token
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=name)


@functools.cache
def sentence_piece(size: int = 360, falls_back: bool = True) -> PreTrainedTokenizerFast:
    """A BPE as Llama 2's: spaces are letters, a text begins with one, and bytes stand in where it has no token."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    # No emoji, and no letters of Asia: those are said in bytes.
    bpe.train_from_iterator(CORPUS[:-1], trainers.BpeTrainer(vocab_size=size))
    model = json.loads(bpe.to_str())["model"]
    lone = [f"<0x{byte:02X}>" for byte in range(256)] if falls_back else []
    words = ["<unk>", "<s>", "</s>", *lone, *sorted(model["vocab"], key=model["vocab"].get)]
    merges = [tuple(pair) for pair in model["merges"]]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=falls_back))
    tokenizer.normalizer = bpe.normalizer
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def shuffled(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """The same words under other ids, and the old id of each new one; special tokens keep theirs."""
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = whole["model"]["vocab"]
    fixed = {token["id"] for token in whole["added_tokens"]}
    free = [number for number in sorted(vocab.values()) if number not in fixed]
    order = [free[place] for place in torch.randperm(len(free), generator=torch.Generator().manual_seed(seed)).tolist()]
    new = dict(zip(free, order, strict=True))
    whole["model"]["vocab"] = {word: new.get(number, number) for word, number in vocab.items()}
    old = {after: before for before, after in new.items()}
    roles = {role: word for role, word in tokenizer.special_tokens_map.items() if isinstance(word, str)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(whole)), **roles)
    return made, [old.get(number, number) for number in range(len(tokenizer))]


PAIRS = [("a", "b"), ("c", "d"), ("ab", "c"), ("e", "e"), ("u", "v"), ("\u010a", "a")]


@functools.cache
def letters(joined: bool = False) -> PreTrainedTokenizerFast:
    """The toy's 23 ids, a to v and a newline; joined: as other ids, with some pairs and a token that begins a text."""
    words = [chr(97 + number) for number in range(22)] + ["\u010a"]
    if joined:
        words = ["<s>", *(first + second for first, second in PAIRS), *words[::-1]]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, PAIRS if joined else []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if not joined:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@functools.cache
def _spelled() -> tuple[list[list[int]], list[int]]:
    """What each joined id is in the toy's ids, and the joined id of each of the toy's."""
    words = {number: word for word, number in letters(joined=True).get_vocab().items()}
    own = letters().get_vocab()
    parts = [[own[letter] for letter in words[number]] if number else [] for number in range(len(words))]
    alone = {part[0]: number for number, part in enumerate(parts) if len(part) == 1}
    return parts, [alone[token] for token in range(len(own))]


def drafter(workshop: Any) -> Any:
    """For the toy, a model of the joined letters that has the toy's own law of what they spell.

    Pairs, which the toy does not have, seem likeliest to it.
    """
    from outrider.drafters.other_words import OtherWords
    from outrider.drafters.small_model import WIDTH, SmallModel
    from tests import toy

    parts, alone = _spelled()

    @dataclass
    class Joined(toy.ToyTarget):
        vocab_size: int = len(parts)

        def law(self, seen: Sequence[int], layers: int) -> Tensor:
            logits = torch.full((self.vocab_size,), 30.0)
            logits[alone] = toy.law([token for number in seen for token in parts[number]], layers)
            return logits

    target = workshop.target
    target.tokenizer = letters()
    return OtherWords(SmallModel.name, WIDTH, workshop, Joined(tokenizer=letters(joined=True)))  # type: ignore[arg-type]
