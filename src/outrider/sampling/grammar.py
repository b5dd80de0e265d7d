"""Grammars over texts as automata over tokens, by llguidance: JSON, JSON schemas, regular expressions, Lark grammars.

A state is a parser of its own: a copy costs microseconds, so every node of a draft tree has one, and walking many paths
at once changes none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.errors import ConfigError, RequestError

WHITESPACE = r"[ ]?|\n[ ]{0,20}"
"""Between the parts of JSON: none, a space, or a new line with its indentation. Where any were allowed, a model that is
not sure what comes next would write spaces to the end of its days."""

LONGEST = 2**17
"""Characters of a grammar, a little more than OpenAI takes of a schema: compiling may take their square, or worse."""
MOST_ITEMS = 20_000
"""Items of a parse that are looked at for one mask, of llguidance's own 50,000: one request's masks keep all others
waiting."""
TOLD = 200
"""Characters of a compiler's message."""


class GrammarMaker:
    """Compiles grammars for one model's tokenizer.

    Args:
        tokenizer: a fast one of Transformers. vocab_size: ids of the target. end_ids: tokens that end a text,
            which a grammar allows where it is satisfied.

    Raises:
        ConfigError: llguidance is not installed. RequestError: it cannot read this tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        try:
            from llguidance import LLMatcher, LLParserLimits
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConfigError(
                'grammars need llguidance: install "outrider[serve]", or leave response_format and grammar out'
            ) from error
        if not end_ids:
            raise RequestError("this model has no end token, so that no grammar could end: leave the grammar out")
        self._matcher = LLMatcher
        self._limits = LLParserLimits(step_max_items=MOST_ITEMS, verbose_errors=False)
        self._decode = tokenizer.decode
        try:
            self._tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(end_ids))
        except Exception as error:  # what it cannot read it tells in exceptions of many kinds
            raise RequestError(f"no grammar can be had for this tokenizer ({error}): leave the grammar out") from error
        self._ends = frozenset(end_ids)

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """Texts that are JSON of a schema.

        Raises:
            RequestError: the schema cannot be compiled, with the compiler's message.
        """
        schema_text = _bounded("JSON schema", json.dumps(schema))
        options: Any = {"whitespace_pattern": WHITESPACE}
        try:
            return self._compile("JSON schema", self._matcher.grammar_from_json_schema(schema_text, overrides=options))
        except ValueError as error:
            raise _refusal("JSON schema", str(error)) from error

    def regex(self, pattern: str) -> Grammar:
        """Texts that match a regular expression (Rust's syntax) from end to end.

        Raises:
            RequestError: the pattern cannot be compiled, with the compiler's message.
        """
        kind = "regular expression"
        return self._compile(kind, self._matcher.grammar_from_regex(_bounded(kind, pattern)))

    def lark(self, grammar: str) -> Grammar:
        """Texts of a context-free grammar in llguidance's dialect of Lark.

        Raises:
            RequestError: the grammar cannot be compiled, with the compiler's message.
        """
        return self._compile("grammar", self._matcher.grammar_from_lark(_bounded("grammar", grammar)))

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of these texts.

        Raises:
            RequestError: there is none, or an empty one.
        """
        if not texts or not all(texts):
            raise _refusal("choice", "give at least one text, and no empty one")
        # JSON's escapes are those of a string in Lark. As one terminal they are an automaton, however many there are.
        choice = _bounded("choice", " | ".join(map(json.dumps, texts)))
        return self._compile("choice", self._matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choice}"))

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; of a special one, its name."""
        found: bytes = self._tokens.decode_bytes([token])
        return found or self._decode([token]).encode()  # it leaves a zero byte out

    def _compile(self, kind: str, grammar: str) -> Grammar:
        matcher = self._matcher(self._tokens, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refusal(kind, matcher.get_error())
        first = matcher.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():
            said = first.get_error()
            raise _refusal(kind, said if said and "NoExtension" not in said else "no text fits it")
        return Grammar(matcher, self._ends)


class Grammar:
    """A compiled grammar: the `Automaton` that `SamplingParams.automaton` takes; many requests may share it."""

    def __init__(self, matcher: Any, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends

    def start(self) -> Any:
        return self._matcher.deep_copy()

    def advance(self, state: Any, token: int) -> Any:
        """A parser that has read `token`, None if `state` forbids it."""
        if state.is_stopped():  # nothing but an end can follow, and another end after it
            return state if token in self._ends else None
        if not state.validate_tokens([token]):
            return None
        after = state.deep_copy()
        if not after.consume_token(token):
            raise _too_much(after.get_error())
        return after

    def allowed(self, state: Any) -> np.ndarray:
        """Allowed token ids, ascending: (A,) int64."""
        mask = state.compute_bitmask()
        if state.is_error():
            raise _too_much(state.get_error())
        return np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little").nonzero()[0]


def _bounded(kind: str, text: str) -> str:
    if len(text) > LONGEST:
        raise RequestError(f"this {kind} has {len(text)} characters and {LONGEST} are compiled: shorten it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refusal(kind, f"character {error.start} is half a surrogate pair") from error
    return text


def _refusal(kind: str, said: str) -> RequestError:
    return RequestError(f"this {kind} does not compile ({_line(said)}): mend it")


def _too_much(said: str) -> RequestError:
    """What is found out only on the way: a limit that was met, or a grammar that no text can go on with."""
    return RequestError(f"this grammar cannot be followed ({_line(said)}): make it simpler")


def _line(said: str) -> str:
    """The compiler's message without what it says of its own inside."""
    told = " ".join(re.split(r"<non-verbose/>|<state>|<backtrace>", said)[0].split())
    return told if len(told) <= TOLD else f"{told[:TOLD]}..."
