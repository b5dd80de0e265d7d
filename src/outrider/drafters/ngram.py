"""Prompt lookup: what followed the last occurrence of the longest matching suffix is guessed to follow again.

Source: Saxena, "Prompt Lookup Decoding" (2023); the same idea as `prompt_lookup_num_tokens` in Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Needs, Workshop
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.request import Request
from outrider.tree import EMPTY_TREE, DraftTree

MIN_MATCH = 2
MAX_MATCH = 8


class _Index:
    """Where each n-gram of one request ends last (and the time before), kept up to date token by token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            stop = len(self.tokens)
            for size in range(MIN_MATCH, min(MAX_MATCH, stop) + 1):
                self._ends.setdefault(tuple(self.tokens[stop - size : stop]), []).append(stop)

    def continuations(self, depth: int, width: int) -> list[list[int]]:
        """Up to `width` different continuations, longest matching suffix first, latest occurrence first."""
        found: list[list[int]] = []
        stop = len(self.tokens)
        for size in range(min(MAX_MATCH, stop - 1), MIN_MATCH - 1, -1):
            ends = self._ends.get(tuple(self.tokens[stop - size : stop]), [])
            for end in reversed(ends[-1 - 4 * width : -1]):  # the very last one is the suffix itself
                guess = self._copy(end, depth)
                if all(guess[: len(other)] != other[: len(guess)] for other in found):
                    found.append(guess)
                    if len(found) == width:
                        return found
        return found

    def _copy(self, end: int, depth: int) -> list[int]:
        """`depth` tokens from `end` on; a match that reaches the suffix itself goes on in a loop (a period)."""
        period = len(self.tokens) - end
        return [self.tokens[end + step % period] for step in range(depth)]


class Ngram:
    """Guesses from the request's own prompt and completion; costs no model and no memory worth naming."""

    name = "ngram"
    needs = Needs()

    def __init__(self, workshop: Workshop) -> None:
        self._indexes: dict[int, _Index] = {}

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        """Nothing to place."""

    def begin(self, request: Request) -> None:
        self._indexes[request.id] = _Index()

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[tuple[Request, int]]) -> None:
        """Tokens are read when a guess is asked for."""

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
