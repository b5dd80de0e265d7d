"""Grammars by llguidance: masks against Python's own `re` and `json`, states that walks share, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.errors import RequestError
from outrider.sampling.context import Context
from outrider.sampling.grammar import GrammarMaker
from outrider.sampling.warp import warp
from outrider.tree import EMPTY_TREE
from tests.laws import make
from tests.server.tiny_chat import make_byte_tokenizer, save_tiny_chat
from tests.toy import ToyTokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": [1, 20, "é"]},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "size", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_byte_tokenizer()


@pytest.fixture(scope="module")
def maker(tokenizer):
    return GrammarMaker(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


# A pattern, and all the texts that it matches.
LANGUAGES = {
    "[abc]{2,4}e": ["".join(word) + "e" for size in (2, 3, 4) for word in itertools.product("abc", repeat=size)],
    "the( the){0,3}": ["the" + " the" * count for count in range(4)],
    "é|er|ab{1,3}c|日": ["é", "er", "abc", "abbc", "abbbc", "日"],
}


@pytest.mark.parametrize("pattern", LANGUAGES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_what_is_allowed_begins_a_text_of_the_language(maker, tokenizer, pattern, data) -> None:
    grammar, end = maker.regex(pattern), tokenizer.eos_token_id
    texts = [text.encode() for text in LANGUAGES[pattern]]
    assert all(re.fullmatch(pattern, text) for text in LANGUAGES[pattern])
    state, said = grammar.start(), b""
    while True:
        allowed = grammar.allowed(state).tolist()
        spelled = {token: said + maker.token_bytes(token) for token in range(len(tokenizer) - 2)}
        begins = [spelled[token] for token in allowed if token != end]
        # Where text is forced, only the tokenizer's own way of writing it is allowed, so not every token that would do.
        assert all(any(text.startswith(begun) for text in texts) for begun in begins)
        place = len(said)
        following = {text[place] for text in texts if text.startswith(said) and len(text) > place}
        assert {begun[place] for begun in begins} == following
        assert (end in allowed) == (said in texts)
        token = data.draw(st.sampled_from(allowed))
        if token == end:
            break
        state, said = grammar.advance(state, token), spelled[token]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_state_is_not_changed_by_walking_on_from_it(maker, data) -> None:
    """A tree walks many paths from one node; each mask is what it is on a walk of its own."""
    grammar = maker.json_schema(SCHEMA)
    states = [((), grammar.start())]
    for _ in range(12):
        path, state = data.draw(st.sampled_from(states))
        token = data.draw(st.sampled_from(grammar.allowed(state).tolist()))
        states.append(((*path, token), grammar.advance(state, token)))
    for path, state in states:
        alone = grammar.start()
        for token in path:
            alone = grammar.advance(alone, token)
        assert grammar.allowed(alone).tolist() == grammar.allowed(state).tolist()
        forbidden = set(range(265)) - set(grammar.allowed(state).tolist())
        assert all(grammar.advance(state, token) is None for token in forbidden)
        assert all(grammar.advance(state, token) is not None for token in grammar.allowed(state).tolist())


def test_nothing_but_the_end_follows_the_end(maker, tokenizer) -> None:
    grammar, end = maker.choice(["ab"]), tokenizer.eos_token_id
    state = grammar.start()
    for token in tokenizer.encode("ab"):
        state = grammar.advance(state, token)
    for _ in range(3):
        assert grammar.allowed(state).tolist() == [end]
        assert grammar.advance(state, 64) is None
        state = grammar.advance(state, end)


def test_choices_are_taken_as_they_are(maker, tokenizer) -> None:
    grammar = maker.choice(['a"b\\n', "日本", "x\n"])
    for text in ('a"b\\n', "日本", "x\n"):
        state = grammar.start()
        for token in tokenizer.encode(text):
            state = grammar.advance(state, token)
        assert tokenizer.eos_token_id in grammar.allowed(state)


@pytest.mark.parametrize(
    ("verb", "value", "said"),
    [
        ("regex", "(a", "regular expression does not compile .*unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: nothing", "unknown name"),
        ("json_schema", {"type": "no type"}, "JSON schema does not compile .*Invalid type"),
        ("json_schema", {"unevaluatedProperties": False}, "Unimplemented keys"),
        ("json_schema", {"type": "string", "pattern": "(?=a)"}, "look-around"),
        ("choice", [], "at least one"),
        ("choice", ["a", ""], "no empty one"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_message(maker, verb, value, said) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        getattr(maker, verb)(value)
    assert "\n" not in str(refused.value)


def test_a_tokenizer_without_an_end_or_of_no_known_kind_is_refused(tokenizer) -> None:
    with pytest.raises(RequestError, match="no end token"):
        GrammarMaker(tokenizer, len(tokenizer), [])
    with pytest.raises(RequestError, match="for this tokenizer"):
        GrammarMaker(ToyTokenizer(), 265, [2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tiny_chat(tmp_path_factory.mktemp("grammar"))


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "lookahead", "early_exit"])
def test_guessed_and_plain_texts_are_the_same_valid_json(folder, drafter) -> None:
    settings = {"kernels": "plain", "threads": 1, "self_test": False, "num_slots": 4096}
    llm = LLM(folder, drafter=drafter, width=2, **settings)
    target = llm.engine.target
    grammar = GrammarMaker(llm.tokenizer, target.vocab_size, sorted(target.eos_ids)).json_schema(SCHEMA)
    each = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=120, automaton=grammar)
        for temperature in (0.0, 1.0)
        for seed in range(6)
    ]
    prompts = ['{"name": "ab", "size": 20, "ok": true}'] * len(each)
    with llm.always_guessing(6):
        guessed = llm.generate(prompts, each, raw=True)
    plain = llm.generate(prompts, [replace(params, speculation=False) for params in each], raw=True)
    assert [r.token_ids for r in guessed] == [r.token_ids for r in plain]
    assert sum(r.tally.accepted for r in guessed) > 0
    ended = [r for r in guessed if r.finish_reason == "stop"]
    assert len(ended) == len(each)
    for result in ended:
        found = json.loads(result.text)
        assert list(found) == ["name", "size", "ok"]
        assert found["size"] in (1, 20, "é")
        assert isinstance(found["ok"], bool)
        assert len(found["name"]) <= 8


def test_masked_rows_never_touch_the_logits(maker) -> None:
    """What a grammar forbids is forbidden in a copy: the row itself may be another request's next."""
    context = Context(make(prompt=(1,), automaton=maker.regex("[ab]+")), 265)
    logits = torch.randn(265)
    before = logits.clone()
    weights = warp(logits, context.rows(EMPTY_TREE)[0])
    assert torch.equal(logits, before)
    assert set((weights > -torch.inf).nonzero().flatten().tolist()) == set(
        maker.regex("[ab]+").allowed(maker.regex("[ab]+").start()).tolist()
    )
