"""Guesses from a pool of n-grams that the target itself made up: in rows that its passes have to spare.

Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (2402.02057): parallel
Jacobi iterations over a window of future positions leave n-grams behind, likely phrases of this text.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.drafters.base import Ask, Commit, Drafter, Needs, Workshop
from outrider.drafters.candidates import Candidate
from outrider.drafters.outcomes import Outcomes
from outrider.drafters.trees import likeliest_paths
from outrider.drafters.weights import Weights
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.request import Request
from outrider.tree import ROOT, DraftTree

WINDOW = 5
"""Future positions that are iterated at once (W in the paper)."""
NGRAM = 4
"""Tokens of an n-gram (N): a position's last N - 1 iterates are run, the next one completes it. With the last known
token the rows make a pass of sixteen, which a fixed width has anyway."""
PER_TOKEN = 8
"""N-grams that are kept by first token (G), the latest found first."""
TOKENS = 4096
"""First tokens that are kept for a request, the latest used."""
LENGTHS = (2, 3)
CONFIDENCE = (0.27, 0.53, 0.67)
"""Chance of the best n-gram's next token, by how many tokens of it were matched: as of other lookups."""
LATER = 0.4
"""... times so much with every n-gram that was found before it."""


class Pool:
    """N-grams by their first token, the latest found first; bounded."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[int, ...]]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        entries = self._found.pop(first, [])
        if rest in entries:
            entries.remove(rest)
        self._found[first] = [rest, *entries[: PER_TOKEN - 1]]  # the newest key of the dictionary
        if len(self._found) > TOKENS:
            del self._found[next(iter(self._found))]

    def after(self, context: Sequence[int]) -> dict[int, int]:
        """Tokens that follow the end of `context` in an n-gram, with how many tokens of it match.

        The longest matches come first, then the latest.
        """
        found: dict[int, int] = {}
        for length in range(min(NGRAM - 1, len(context)), 0, -1):
            start = context[len(context) - length :]
            for rest in self._found.get(start[0], ()):
                if rest[: length - 1] == tuple(start[1:]):
                    found.setdefault(rest[length - 1], length)
        return found


@dataclass(slots=True)
class _Jacobi:
    """One request's window: each column holds the last iterates of one future position and those that follow it.

    Columns hang together as in the paper: the oldest iterates make a line behind the known text, and the later ones of
    a column go on from its oldest. So a pass over them is a pass over a tree.
    """

    pool: Pool = field(default_factory=Pool)
    columns: list[list[int]] = field(default_factory=list)
    read: int = 0
    """Known tokens whose n-grams are in the pool."""
    newest: list[int] = field(default_factory=list)
    """Nodes of the last probe whose logits make the next iterates, column by column."""

    def tree(self, max_nodes: int, max_depth: int) -> DraftTree:
        """As many whole columns as the rows allow."""
        nodes: dict[tuple[int, int], int] = {}  # by parent and token: equal ones are one row
        self.newest = []
        line = ROOT
        for number, column in enumerate(self.columns):
            if len(nodes) + len(column) > max_nodes or number + len(column) > max_depth:
                break
            node = line = nodes.setdefault((line, column[0]), len(nodes))
            for token in column[1:]:
                node = nodes.setdefault((node, token), len(nodes))
            self.newest.append(node)
        return DraftTree(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))

    def grow(self, iterates: Sequence[int]) -> None:
        """Take in the next iterates of the first columns."""
        for column, token in zip(self.columns, iterates, strict=False):
            column.append(token)
            if len(column) == NGRAM:
                self.pool.add(column)
                del column[0]


class Lookahead(Drafter):
    """Needs no weights. Where no rows are spare it guesses from what the text holds already.

    The iterates are the target's likeliest tokens without any noise: an n-gram serves at whatever position its first
    token turns up, and the noise of one position is not that of another.
    """

    name = "lookahead"
    needs = Needs(ranks=True, extra_rows=WINDOW * (NGRAM - 1))

    def __init__(self, workshop: Workshop) -> None:
        self._windows: dict[int, _Jacobi] = {}
        self._weights = Weights(LENGTHS)
        self._outcomes = Outcomes()

    def begin(self, request: Request) -> None:
        self._windows[request.id] = _Jacobi()

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        self._outcomes.observe(commits)
        probed = [commit for commit in commits if len(commit.probes)]
        if not probed:
            return
        rows = [commit.probes[node] for commit in probed for node in self._windows[commit.request.id].newest]
        iterates = iter(_argmax(output.logits[rows]))
        for commit in probed:
            window = self._windows[commit.request.id]
            window.grow([next(iterates) for _ in window.newest])

    def grade(self, request: Request) -> int:
        """How many tokens of the text's end begin an n-gram of the pool; 0 where nothing is to be guessed."""
        return max(self._follow(request).pool.after(_end(request)).values(), default=0)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [self._guess(ask) for ask in asks]

    def probe(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = []
        for ask in asks:
            window = self._windows[ask.request.id]
            if not window.columns:  # any tokens do to begin with; those of the text are likelier than others
                owner = random.Random(ask.request.seed)
                known = ask.request.tokens(0, ask.request.num_tokens)
                window.columns = [[owner.choice(known)] for _ in range(WINDOW)]
            trees.append(window.tree(ask.budget.nodes, ask.budget.depth))
        return trees

    def end(self, request: Request) -> None:
        self._windows.pop(request.id, None)
        self._outcomes.end(request)

    def _follow(self, request: Request) -> _Jacobi:
        """The request's window, its pool up to date with what has been said."""
        window = self._windows[request.id]
        last = request.num_tokens - NGRAM + 1
        if window.read < last:
            tokens = request.tokens(window.read, request.num_tokens)
            for start in range(last - window.read):
                window.pool.add(tokens[start : start + NGRAM])
            window.read = last
        return window

    def _guess(self, ask: Ask) -> DraftTree:
        pool = self._follow(ask.request).pool

        def children(context: tuple[int, ...], depth: int) -> Iterator[tuple[Candidate, tuple[int, ...]]]:
            for rank, (token, length) in enumerate(pool.after(context).items()):
                if rank == ask.budget.width:
                    return
                prior = CONFIDENCE[bisect_right(LENGTHS, length)] * LATER**rank
                weight, cell = self._weights.weigh(length, prior, rank, depth)
                yield Candidate(token, weight, prior, rank, cell, self._weights), (*context, token)[1 - NGRAM :]

        tree, candidates = likeliest_paths(_end(ask.request), ask.budget, children)
        self._outcomes.remember(ask.request, tree, candidates)
        return tree


def _end(request: Request) -> tuple[int, ...]:
    """The last tokens that an n-gram could match."""
    return tuple(request.tokens(max(0, request.num_tokens - NGRAM + 1), request.num_tokens))


def _argmax(logits: Tensor) -> list[int]:
    """The likeliest token a row: (P, V) -> P ids; of a row that holds no law, any."""
    ids: list[int] = logits.argmax(dim=1).tolist()
    return ids
