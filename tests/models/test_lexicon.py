"""What ids stand for, and which of two tokenizers' ids stand for the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outrider.errors import ModelError
from outrider.models.lexicon import NOBODY, Lexicon, first_difference, shared, special_pairs
from tests.models.tiny import make_tokenizer
from tests.other_words import byte_level, letters, sentence_piece, shuffled

KINDS = {"byte-level": byte_level, "SentencePiece": sentence_piece}


def lexicon(tokenizer: PreTrainedTokenizerFast) -> Lexicon:
    return Lexicon(tokenizer, len(tokenizer))


def said(words: Lexicon, ids: list[int]) -> bytes:
    return b"".join(words.stands_for[number] or b"" for number in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_every_id_stands_for_what_the_tokenizer_decodes_it_to(kind: str) -> None:
    """Their own decoder is the witness where an id is text by itself; SentencePiece's drops a text's first space."""
    tokenizer = KINDS[kind]()
    words = lexicon(tokenizer)
    compared = 0
    for number, text in enumerate(words.stands_for):
        if text is None:
            assert number in tokenizer.all_special_ids
            continue
        decoded = tokenizer.decode([number, number])
        if "\ufffd" not in decoded:
            assert decoded.encode() in (text + text, (text + text).removeprefix(b" "))
            compared += 1
    assert compared > 200


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60), kind=st.sampled_from(list(KINDS)))
def test_spelling_says_the_text_and_is_the_tokenizers_own(text: str, kind: str) -> None:
    tokenizer = KINDS[kind]()
    words, wanted = lexicon(tokenizer), text.encode(errors="ignore")
    pieces = words.spell(wanted)
    ids = [number for number, _ in pieces]
    assert said(words, ids) in (wanted, b" " + wanted)
    assert sum(size for _, size in pieces) == len(wanted)
    if not any(name in text for name in words.special):
        assert ids == tokenizer.encode(wanted.decode(), add_special_tokens=False)


@settings(max_examples=60, deadline=None)
@given(text=st.binary(max_size=40), kind=st.sampled_from(list(KINDS)))
def test_bytes_that_are_no_text_are_said_one_by_one(text: bytes, kind: str) -> None:
    words = lexicon(KINDS[kind]())
    pieces = words.spell(text)
    assert sum(size for _, size in pieces) == len(text)
    assert said(words, [number for number, _ in pieces]).replace(b" ", b"") == text.replace(b" ", b"")


def test_a_byte_that_nobody_stands_for_is_told() -> None:
    words = lexicon(sentence_piece(falls_back=False))
    assert words.spell(b"water \xe6")[-1] == (NOBODY, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_a_special_token_in_a_text_is_spelled(kind: str) -> None:
    tokenizer = KINDS[kind]()
    words = lexicon(tokenizer)
    (name, *_) = (name for name in words.special if name != "<unk>")
    pieces = words.spell(f"a {name} b".encode())
    assert not {number for number, _ in pieces} & set(words.special.values())
    assert said(words, [number for number, _ in pieces]).strip() == f"a {name} b".encode()


@pytest.mark.parametrize(("first", "second"), [("byte-level", "SentencePiece"), ("SentencePiece", "byte-level")])
def test_shared_ids_stand_for_the_same_bytes(first: str, second: str) -> None:
    target, drafter = lexicon(KINDS[first]()), lexicon(KINDS[second]())
    kept, columns = (ids.tolist() for ids in shared(target, drafter))
    assert len(kept) > 50
    assert kept == sorted(set(kept))
    assert len(set(columns)) == len(columns)
    specials = special_pairs(target, drafter)
    for token, column in zip(kept, columns, strict=True):
        if token in specials:
            assert specials[token] == column
        else:
            assert target.stands_for[token] == drafter.stands_for[column] != None  # noqa: E711
    # All that both can say is shared: compared by text, as nothing above was.
    texts = [{text for text in words.stands_for if text} for words in (target, drafter)]
    assert len(kept) == len(texts[0] & texts[1]) + len(specials)


def test_a_special_token_is_never_matched_by_what_its_name_spells() -> None:
    """`</s>` ends SentencePiece's texts, and is an ordinary word of the other, which ends its own by another name."""
    target, drafter = lexicon(byte_level()), lexicon(sentence_piece())
    ordinary = target.by_bytes[b"</s>"]
    kept, columns = (ids.tolist() for ids in shared(target, drafter))
    pairs = dict(zip(kept, columns, strict=True))
    assert drafter.special["</s>"] not in {pairs[token] for token in kept if token != target.end}
    assert ordinary not in pairs
    assert pairs[target.end] == drafter.end


def test_special_tokens_meet_by_name_before_they_meet_as_ends() -> None:
    def made(*names: str) -> Lexicon:
        tokenizer = Tokenizer(models.BPE({"a": 0, "\u0120": 1}, []))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
        return lexicon(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=names[0]))

    assert special_pairs(made("<x>", "<y>"), made("<y>", "<z>", "<x>")) == {2: 4, 3: 2}
    assert special_pairs(made("<x>"), made("<y>", "<z>")) == {2: 2}


def test_of_two_ids_for_one_text_the_word_is_meant_not_the_lone_byte() -> None:
    tokenizer = sentence_piece()
    words = lexicon(tokenizer)
    assert words.by_bytes[b"e"] == tokenizer.convert_tokens_to_ids("e") != tokenizer.convert_tokens_to_ids("<0x65>")


def test_what_a_text_begins_with() -> None:
    assert lexicon(byte_level()).opening == ()
    assert lexicon(sentence_piece()).opening == (1,)


def test_ids_beyond_the_vocabulary_stand_for_nothing() -> None:
    tokenizer = byte_level()
    small = Lexicon(tokenizer, 300)
    assert len(small.stands_for) == 300
    kept, columns = shared(lexicon(tokenizer), small)
    assert int(columns.max()) < 300
    assert int(shared(small, lexicon(tokenizer))[0].max()) < 300
    assert len(kept) == 300


def test_a_tokenizer_whose_ids_are_no_bytes_is_refused() -> None:
    with pytest.raises(ModelError, match="neither byte-level nor SentencePiece's"):
        lexicon(make_tokenizer())
    with pytest.raises(ModelError, match="does not tell what its ids stand for"):
        Lexicon(object(), 5)


def test_the_first_difference_is_named() -> None:
    assert first_difference(make_tokenizer(100), make_tokenizer(100)) is None
    assert first_difference(make_tokenizer(100), make_tokenizer(101)) == "id 100 is None in one and 'w100' in the other"
    other, _ = shuffled(letters())
    assert first_difference(letters(), other).startswith("id 0 is 'a' in one and ")
