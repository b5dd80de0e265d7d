"""What the sampling of one request depends on besides its logits: what was asked, and what has been said so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.kernels.warps import Fields, WarpsRows
from outrider.request import Request, SamplingParams
from outrider.tree import ROOT, DraftTree

MOST_PENDING = 32
"""Tokens said that a kernel is told one by one before they join the counts on its device."""
_LEAST_TEMPERATURE = 1e-30
"""Below it a float32 temperature nears the subnormal numbers, which some devices flush to 0."""


class Context:
    """One request's side of sampling; it follows `request.output` by itself, so that it can never fall behind it.

    Attributes:
        temperature: 0 is greedy; rounded to float32, as the kernel takes it, so that law and draw agree.
        seed_bits: the seed's 64 bits as an int64.
        fields: the numbers among what was asked, as those kernels take them.
        warper: kernels that warp this request's rows, wherever its law is wanted; None where PyTorch does.
    """

    def __init__(
        self, request: Request, vocab_size: int, device: torch.device | str = "cpu", kernels: object = None
    ) -> None:
        """Refuses what could not be honoured.

        kernels: those of the target, if the request's laws are to be made by them where they can.

        Raises:
            RequestError: a sampling field names a token outside the vocabulary, or the temperature is next to 0.
        """
        params = request.params
        bad_words = tuple(words for words in params.bad_words if not isinstance(words, str))
        if len(bad_words) < len(params.bad_words):
            raise RequestError(
                "bad_words holds a text where token ids are needed: encode it with the model's tokenizer"
            )
        _refuse_foreign_tokens(params, bad_words, vocab_size)
        if 0 < params.temperature < _LEAST_TEMPERATURE:
            raise RequestError(f"temperature={params.temperature!r} is too small to divide by: give 0 for greedy")
        self.request = request
        self.params = params
        self.bad_words = bad_words
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.temperature = float(torch.tensor(params.temperature, dtype=torch.float32))
        self.seed_bits = request.seed - (1 << 64) if request.seed >= 1 << 63 else request.seed
        self.penalises = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)
        # At temperature 0 every truncation keeps the argmax, which is all that is drawn.
        self.truncates = params.temperature > 0 and (
            0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0
        )
        self._names_tokens = bool(params.logit_bias or bad_words or params.automaton)
        self._always_warps = self._names_tokens or self.penalises or self.truncates
        self.fields = _fields(params, self.temperature if self.truncates else None, vocab_size)
        self.warper = kernels if isinstance(kernels, WarpsRows) else None
        self._num_followed = 0
        self._num_counted = 0
        self._state = self._start()
        self._counts: Tensor | None = None
        self.in_prompt: Tensor | None = None
        if self.penalises:
            self._counts = torch.zeros(vocab_size, dtype=torch.int32, device=self.device)
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=self.device)
            self.in_prompt[torch.tensor(request.prompt, dtype=torch.int64, device=self.device)] = True
        self.bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=self.device)
        self.bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self.device)

    @property
    def position(self) -> int:
        """Output position of the token drawn next (0: the first of the completion)."""
        return len(self.request.output)

    def warps(self, position: int) -> bool:
        """Whether the law at an output position differs from `softmax(logits / temperature)` in any way."""
        return self._always_warps or position < self.params.min_tokens

    def warps_by_fields(self, position: int) -> bool:
        """Whether from an output position on nothing but `fields` and what was said warps the law, if anything does."""
        return not self._names_tokens and position >= self.params.min_tokens

    def counts(self, path: tuple[int, ...]) -> Tensor:
        """How often each token was said in the completion, the path's tokens included: (V,) int32."""
        self._count()
        assert self._counts is not None
        if not path:
            return self._counts
        ids = torch.tensor(path, dtype=torch.int64, device=self.device)
        return self._counts.index_add(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def said(self) -> tuple[Tensor, Tensor] | None:
        """Of a request that is penalised: how often each token was said until now, and whether the prompt holds it."""
        if self.in_prompt is None:
            return None
        return self.counts(()), self.in_prompt

    def rows(self, tree: DraftTree) -> list[Row]:
        """The rows of a tree, the root's first: `rows[i + 1]` is where the token after node `i` is drawn."""
        self._follow()
        rows = [Row(self, (), self._state)]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            above = rows[parent + 1 if parent != ROOT else 0]
            rows.append(Row(self, (*above.path, token), self._advance(above.state, token)))
        return rows

    def counted(self) -> tuple[int, int, list[int]]:
        """Addresses of the counts (V,) int32 and of `in_prompt` (V,) bool, and what was said and is not counted yet."""
        if len(self.request.output) - self._num_counted > MOST_PENDING:
            self._count()
        assert self._counts is not None
        assert self.in_prompt is not None
        return self._counts.data_ptr(), self.in_prompt.data_ptr(), self.request.output[self._num_counted :]

    def allowed(self, state: Any) -> np.ndarray | None:
        """Ids (A,) int64 that the automaton allows in `state`; None for every token.

        Raises:
            RequestError: it failed on the way here, fails now, or names a token outside the vocabulary.
        """
        if self.params.automaton is None:
            return None
        if isinstance(state, RequestError):
            raise state
        try:
            allowed = self.params.automaton.allowed(state)
            if allowed is None:
                return None
            ids = np.asarray(allowed if isinstance(allowed, np.ndarray) else list(allowed), dtype=np.int64)
            known = ids.size == 0 or (int(ids.min()) >= 0 and int(ids.max()) < self.vocab_size)
        except Exception as error:  # an automaton is the caller's program and may raise anything
            raise _failure("allowed", error) from error
        if not known:
            raise RequestError(
                f"the automaton allows a token that this model lacks: its ids end at {self.vocab_size - 1}"
            )
        return ids

    def _start(self) -> Any:
        if self.params.automaton is None:
            return None
        try:
            state = self.params.automaton.start()
        except Exception as error:  # as in `allowed`
            raise _failure("start", error) from error
        if state is None:
            raise RequestError("the automaton starts in None, which marks a forbidden path: return another state")
        return state

    def _advance(self, state: Any, token: int) -> Any:
        """The state after `token`; an error is a state too, which is told only where a walk needs to know."""
        if state is None or isinstance(state, RequestError):
            return state
        assert self.params.automaton is not None
        try:
            return self.params.automaton.advance(state, token)
        except Exception as error:  # as in `allowed`
            return _failure("advance", error)

    def _follow(self) -> None:
        """Take in the tokens delivered since the last call."""
        said = self.request.output[self._num_followed :]
        if not said:
            return
        self._num_followed += len(said)
        if self.params.automaton is not None:
            for token in said:
                self._state = self._advance(self._state, token)
                if self._state is None:
                    self._state = RequestError(f"the automaton allowed token {token} and then forbade it: mend it")

    def _count(self) -> None:
        """Take the tokens delivered since the last call into the counts."""
        said = self.request.output[self._num_counted :]
        if said and self._counts is not None:
            self._num_counted += len(said)
            ids = torch.tensor(said, dtype=torch.int64, device=self.device)
            self._counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class Row:
    """One place where a token is drawn: after the completion so far and the tokens of a path through the tree.

    Attributes:
        path: tokens from the first level of the tree to this node; empty at the root.
        state: the automaton's state here, or the error with which it failed on the way here; None without an
            automaton, and on a path that it forbids.
    """

    context: Context
    path: tuple[int, ...] = ()
    state: Any = None

    @property
    def position(self) -> int:
        return self.context.position + len(self.path)

    @property
    def is_dead(self) -> bool:
        """The path breaks the grammar: no walk reaches this row, whatever is drawn here."""
        return self.context.params.automaton is not None and self.state is None

    def forbidden(self) -> list[int]:
        """Tokens that bad words and min_tokens forbid here."""
        context = self.context
        found = [words[-1] for words in context.bad_words if self.ends_with(words[:-1])]
        if self.position < context.params.min_tokens:
            found += context.request.end_ids
        return found

    def ends_with(self, words: tuple[int, ...]) -> bool:
        """Whether the completion up to here ends with these tokens."""
        num = len(words)
        if num <= len(self.path):
            return self.path[len(self.path) - num :] == words
        output = self.context.request.output
        split = num - len(self.path)
        return self.path == words[split:] and len(output) >= split and tuple(output[-split:]) == words[:split]


def _fields(params: SamplingParams, heat: float | None, vocab_size: int) -> Fields:
    """heat: the temperature of what is truncated; None where nothing is."""
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    if heat is None:
        return Fields((1.0, *penalties))
    least = math.log(params.min_p) if params.min_p > 0 else -math.inf
    return Fields((heat, *penalties), (params.top_p, least), params.top_k if params.top_k < vocab_size else 0)


def _failure(verb: str, error: Exception) -> RequestError:
    if isinstance(error, RequestError):  # it has said itself what is wrong
        return error
    return RequestError(f"the automaton failed in {verb} ({type(error).__name__}: {error}): mend it, or leave it out")


def _refuse_foreign_tokens(params: SamplingParams, bad_words: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    named = {
        "logit_bias": list(params.logit_bias),
        "bad_words": [token for words in bad_words for token in words],
        "stop_token_ids": list(params.stop_token_ids),
    }
    for name, tokens in named.items():
        largest = max(tokens, default=-1)
        if largest >= vocab_size:
            raise RequestError(f"{name} names token {largest}, but this model's ids end at {vocab_size - 1}")
