"""A drafter of another tokenizer: it reads what the target said, guesses the target's tokens, and changes no text."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.drafters.retold import LONGEST, WINDOW, Retold
from outrider.errors import ConfigError, ModelError
from outrider.models.lexicon import Lexicon
from outrider.registry import DRAFTERS
from tests import toy
from tests.contracts.test_drafters import rate, requests, spied
from tests.models.tiny import make_module, make_tokenizer
from tests.other_words import CORPUS, byte_level, letters, sentence_piece, shuffled

NAME = next(name for name in DRAFTERS if name == "small_model")
TOKENIZERS = {"byte-level": byte_level, "other byte-level": lambda: byte_level(330, "<end>"), "pieces": sentence_piece}
TEXT = " ".join(CORPUS)


@functools.cache
def lexicon(name: str) -> Lexicon:
    tokenizer = TOKENIZERS[name]()
    return Lexicon(tokenizer, len(tokenizer))


def said(words: Lexicon, ids: list[int]) -> bytes:
    return b"".join(words.stands_for[number] or b"" for number in ids)


def told(retold: Retold, tokens: list[int], rng: random.Random) -> list[int]:
    """Tell tokens in pieces of any size; what is said to have stayed the same has."""
    start = 0
    while start < len(tokens):
        stop = start + rng.randint(1, 5)
        before = list(retold.ids)
        same = retold.extend(tokens[start:stop])
        assert retold.ids[:same] == before[:same]
        assert same == len(before) or same == len(retold.ids) or retold.ids[same] != before[same]
        start = stop
    return retold.ids


@settings(max_examples=80, deadline=None)
@given(data=st.data(), target=st.sampled_from(list(TOKENIZERS)), drafter=st.sampled_from(list(TOKENIZERS)))
def test_any_tokens_are_told_in_the_drafters_ids(data: st.DataObject, target: str, drafter: str) -> None:
    """Any ids, also such as are half a character or none; bytes only are compared, as no text need be there."""
    words, own = lexicon(target), lexicon(drafter)
    ordinary = [number for number, text in enumerate(words.stands_for) if text]
    tokens = data.draw(st.lists(st.sampled_from(ordinary), max_size=90))
    ids = told(Retold(words, own), tokens, random.Random(len(tokens)))
    assert tuple(ids[: len(own.opening)]) == own.opening
    assert said(own, ids).replace(b" ", b"") == said(words, tokens).replace(b" ", b"")


@settings(max_examples=40, deadline=None)
@given(text=st.lists(st.sampled_from(TEXT.split(" ")), min_size=1, max_size=60), seed=st.integers(0, 1000))
def test_a_text_that_came_token_by_token_is_told_as_the_tokenizer_tells_it_at_once(text: list[str], seed: int) -> None:
    rng = random.Random(seed)
    for target, drafter in (("byte-level", "pieces"), ("pieces", "byte-level"), ("byte-level", "other byte-level")):
        tokenizer, own = TOKENIZERS[target](), TOKENIZERS[drafter]()
        tokens = tokenizer.encode(" ".join(text))  # with what begins a text, where there is such a token
        assert told(Retold(lexicon(target), lexicon(drafter)), tokens, rng) == own.encode(" ".join(text))


@pytest.mark.parametrize(
    "text", ["\u6cb3\u5ddd\u548c\u5927\u6d77\u3002" * 60, "\U0001f600\U0001f680" * 120, " \n\t " * 300]
)
def test_a_text_without_words_costs_no_more_as_it_grows(text: str) -> None:
    words, own = lexicon("byte-level"), lexicon("pieces")
    retold = Retold(words, own)
    tokens = byte_level().encode(text)
    ids = told(retold, tokens, random.Random(3))
    assert said(own, ids).strip() == text.encode().strip()
    assert len(retold._window) <= LONGEST + 20
    assert len(text.encode()) > LONGEST + WINDOW


def test_a_character_that_is_not_whole_yet_cannot_be_told_without_bytes() -> None:
    words = lexicon("byte-level")
    own = Lexicon(sentence_piece(falls_back=False), 500)
    retold = Retold(words, own)
    first, second = "\u00fc".encode()
    retold.extend([words.by_bytes[b"e"], words.by_bytes[bytes([first])]])
    assert (retold.says_end, said(own, retold.ids).strip()) == (False, b"e")
    retold.extend([words.by_bytes[bytes([second])]])
    assert (retold.says_end, said(own, retold.ids).strip()) == (True, "e\u00fc".encode())


def test_special_tokens_are_told_as_special_tokens_and_a_beginning_once() -> None:
    target, own = lexicon("pieces"), lexicon("pieces")
    text = sentence_piece().encode("A river")
    assert text[0] == target.begin == 1
    assert Retold(target, own).extend([]) == 1
    retold = Retold(target, own)
    retold.extend([*text, target.end, *text[1:]])
    assert retold.ids == [*text, own.end, *text[1:]]


def test_guesses_of_the_same_law_in_other_words_are_all_right() -> None:
    """Wrong keys, a wrong rollback, a wrong id or noise of another position would each be told at once."""
    for temperature in (0.0, 1.0):
        engine = toy.make_engine(NAME + toy.OTHER_WORDS, depth=4)
        asked = requests(count=6, temperature=temperature, max_tokens=60)
        toy.run(engine, asked)
        assert sum(request.tally.drafted for request in asked) > 250
        assert rate(NAME, asked) == 1.0


def test_without_slots_for_its_own_text_it_is_silent() -> None:
    engine, spy = spied(NAME + toy.OTHER_WORDS, depth=3)
    inner = spy.inner
    blocks = inner.ledger.pool.allocate(inner.ledger.pool.num_available - 2)
    asked = requests(count=1, max_tokens=30)
    engine.add(asked[0])
    while not asked[0].is_finished:
        engine.step()
    lengths = [len(tree) for _, tree in spy.asked]
    assert lengths[0] == 0
    inner.ledger.pool.release(blocks)
    inner.ledger.check()
    assert inner.ledger.pool.num_held == 0


def test_beyond_its_own_context_it_is_silent() -> None:
    engine, spy = spied(NAME + toy.OTHER_WORDS, depth=3)
    spy.inner.model.max_positions = 20
    toy.run(engine, [toy.make_request(0, [1, 2, 3], SamplingParams(max_tokens=60, seed=1))])
    lengths = [len(tree) for _, tree in spy.asked]
    assert min(lengths[:3]) > 0
    assert set(lengths[-20:]) == {0}


def save(folder: Path, tokenizer: PreTrainedTokenizerFast, module: object = None, **changes: object) -> Path:
    settings = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None} | changes
    module = module or make_module("llama", **settings)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target; itself under other ids, so that its guesses are right; and two models of other tokenizers."""
    root, tokenizer = tmp_path_factory.mktemp("models"), byte_level()
    target = make_module("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    found = {"target": save(root / "target", tokenizer, target)}
    other, old = shuffled(tokenizer)
    with torch.no_grad():
        for weights in (target.get_input_embeddings().weight, target.get_output_embeddings().weight):
            weights.copy_(weights[old].clone())
    found["itself"] = save(root / "itself", other, target)
    found["pieces"] = save(root / "pieces", sentence_piece(), num_hidden_layers=1)
    found["byte-level"] = save(root / "byte-level", byte_level(330, "<end>"), num_hidden_layers=1)
    found["no bytes"] = save(root / "words", make_tokenizer())
    return found


PROMPTS = [
    "The river Loire is the longest river of France,",
    " def step(self):\n    return [",
    "\u6cb3\u5ddd\u548c\u5927\u6d77\u3002 \U0001f600 Stra\u00dfe <|end|> </s>",
]


def engine(folders: dict[str, Path], drafter: str | None, **more: object) -> LLM:
    named = {"drafter": NAME, "drafter_model": str(folders[drafter])} if drafter else {"drafter": "none"}
    return LLM(str(folders["target"]), kernels="plain", self_test=False, num_slots=4096, **named, **more)


@pytest.mark.parametrize("drafter", ["itself", "pieces", "byte-level"])
def test_the_same_text_at_any_temperature_alone_and_together(folders: dict[str, Path], drafter: str) -> None:
    """Fault 25; a random model says anything, so that its bytes are seldom whole characters."""
    params = [SamplingParams(temperature=t, max_tokens=28, seed=i) for i, t in enumerate((0.0, 0.7, 1.3))]
    plain = engine(folders, None).generate(PROMPTS, params, raw=True)
    llm = engine(folders, drafter, depth=4, width=2, adaptive=False)
    with llm.engine.always_guessing(4, 2):
        together = llm.generate(PROMPTS, params, raw=True)
        alone = [llm.generate(prompt, param, raw=True)[0] for prompt, param in zip(PROMPTS, params, strict=True)]
    for found in (together, alone):
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
        assert min(result.tally.drafted for result in found) > 15
    assert llm.engine.drafter.ledger.pool.num_held == 0
    if drafter == "itself":
        tally = [sum(getattr(result.tally, name) for result in together) for name in ("accepted", "cycles")]
        assert tally[0] / tally[1] > 3  # of 4 levels, but where its tokenizer would have cut the text otherwise
    assert any(f"it can guess {len(llm.engine.drafter.kept)} of the target's 400" in n for n in llm.resolved.notes)


def test_under_the_rejection_rule_what_is_drawn_is_what_is_told(folders: dict[str, Path]) -> None:
    """Every law is one over what both can say, sums to 1, and holds each child that was drawn from it."""
    llm = engine(folders, "pieces", depth=3, width=2, adaptive=False, acceptance="rejection")
    drafter = llm.engine.drafter
    propose, trees = drafter.propose, []
    drafter.propose = lambda asks: trees.extend(propose(asks)) or trees[-len(asks) :]
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
    with llm.engine.always_guessing(3, 2):
        llm.generate(PROMPTS, params, raw=True)
    laws = torch.cat([tree.laws for tree in trees if tree.laws is not None]).double()
    tokens = torch.tensor([token for tree in trees for token in tree.tokens])
    assert len(laws) == len(tokens) > 100
    torch.testing.assert_close(laws.sum(1), torch.ones(len(laws), dtype=torch.float64), atol=1e-5, rtol=0)
    assert bool((laws.gather(1, tokens[:, None]) > 0).all())
    foreign = torch.ones(laws.shape[1], dtype=torch.bool)
    foreign[drafter.kept] = False
    assert foreign.sum() > 50
    assert float(laws[:, foreign].abs().max()) == 0.0


def test_a_tokenizer_that_says_no_bytes_is_refused_with_the_first_difference(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"id 0 is .* in one and 'w0' in the other.*neither byte-level"):
        engine(folders, "no bytes")


def test_a_drafter_that_guesses_at_chance_is_told_of(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="no better than chance"):
        LLM(str(folders["target"]), drafter=NAME, drafter_model=str(folders["pieces"]), kernels="plain", num_slots=4096)


def test_letters_of_the_toy_are_its_ids() -> None:
    assert letters().encode("abv\n") == [0, 1, 21, toy.NEWLINE]
    assert letters(joined=True).encode("abc\na")[0] == 0
