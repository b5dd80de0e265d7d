"""Prompt lookup: what followed the last occurrence of the longest matching suffix is guessed to follow again.

Source: Saxena, "Prompt Lookup Decoding" (2023); the same idea as `prompt_lookup_num_tokens` in Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.base import Ask, Drafter, Workshop
from outrider.request import Request
from outrider.tree import EMPTY_TREE, DraftTree

MAX_MATCH = 16
"""A longer match is hardly better evidence: in texts that copy, 98 % of next tokens were right from here on."""
CANDIDATES = 64
"""Latest occurrences that are looked at."""


class _Index:
    """Where each token and each pair of tokens of one request ends, kept up to date token by token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._matches: list[tuple[int, int]] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._matches = None
        for token in tokens:
            self.tokens.append(token)
            self._ends.setdefault((token,), []).append(len(self.tokens))
            if len(self.tokens) > 1:
                self._ends.setdefault((self.tokens[-2], token), []).append(len(self.tokens))

    def matches(self) -> list[tuple[int, int]]:
        """Earlier occurrences of the text's own end as (length, end), the longest first, then the latest.

        Looked up by the last two tokens, so that long matches are found cheaply; by the last one where these are new.
        """
        if self._matches is None:  # the grade and the guess of one cycle ask for the same
            ends = self._ends.get(tuple(self.tokens[-2:]), [])[-1 - CANDIDATES : -1]  # the very last is the end itself
            if ends:
                self._matches = sorted(((self._length(end), end) for end in ends), reverse=True)
            else:  # no two tokens match, so that one does
                ends = self._ends.get(tuple(self.tokens[-1:]), [])[-1 - CANDIDATES : -1]
                self._matches = [(1, end) for end in reversed(ends)]
        return self._matches

    def continuations(self, depth: int, width: int) -> list[list[int]]:
        """Up to `width` different continuations, best match first."""
        found: list[list[int]] = []
        for _, end in self.matches():
            guess = self._copy(end, depth)
            if guess not in found:
                found.append(guess)
                if len(found) == width:
                    break
        return found

    def _length(self, end: int) -> int:
        """How many tokens before `end` equal the last ones of the text."""
        length, most = 1, min(MAX_MATCH, end)
        while length < most and self.tokens[end - 1 - length] == self.tokens[-1 - length]:
            length += 1
        return length

    def _copy(self, end: int, depth: int) -> list[int]:
        """`depth` tokens from `end` on; a match that reaches the suffix itself goes on in a loop (a period)."""
        period = len(self.tokens) - end
        return [self.tokens[end + step % period] for step in range(depth)]


class Ngram(Drafter):
    """Guesses from the request's own prompt and completion; costs no model and no memory worth naming."""

    name = "ngram"

    def __init__(self, workshop: Workshop) -> None:
        self._indexes: dict[int, _Index] = {}

    def begin(self, request: Request) -> None:
        self._indexes[request.id] = _Index()

    def grade(self, request: Request) -> int:
        """The length of the longest match; 0 where nothing is to be guessed."""
        index = self._indexes[request.id]
        index.extend(request.tokens(len(index.tokens), request.num_tokens))
        matches = index.matches()
        return matches[0][0] if matches else 0

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [self._guess(ask) for ask in asks]

    def end(self, request: Request) -> None:
        self._indexes.pop(request.id, None)

    def _guess(self, ask: Ask) -> DraftTree:
        index = self._indexes[ask.request.id]
        index.extend(ask.request.tokens(len(index.tokens), ask.request.num_tokens))
        return merge(index.continuations(ask.budget.depth, ask.budget.width), ask.budget.nodes)


def merge(continuations: Sequence[Sequence[int]], max_nodes: int) -> DraftTree:
    """A tree of several continuations with their common beginnings shared; earlier ones first."""
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for continuation in continuations:
        parent = -1
        for token in continuation:
            node = known.get((parent, token))
            if node is None:
                if len(tokens) == max_nodes:
                    break
                node = known[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            parent = node
    return DraftTree(tuple(tokens), tuple(parents)) if tokens else EMPTY_TREE
