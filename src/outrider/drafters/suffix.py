"""Guesses what followed the text's end before, by frequency: a suffix automaton over this request, and past ones.

Source: Oliaro et al., "SuffixDecoding" (2411.04975), with an automaton (Blumer et al., "The smallest automaton
recognizing the subwords of a text", 1985) in the place of its suffix trees.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from outrider.drafters.base import Ask, Commit, Drafter, Needs, Workshop
from outrider.drafters.candidates import Candidate
from outrider.drafters.outcomes import Outcomes
from outrider.drafters.trees import likeliest_paths
from outrider.drafters.weights import Weights
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.request import Request
from outrider.tree import DraftTree

LENGTHS = (2, 3, 4, 6, 9, 16)
"""Contexts are told apart by their length from here to here ..."""
CONFIDENCE = (0.41, 0.59, 0.70, 0.76, 0.83, 0.88, 0.95)
"""... and what followed one before follows again so often (replies of a 135M model to Spec-Bench prompts)."""
LONGEST = 32
"""Tokens of the text's end that are looked up in past requests."""
BACKOFF = 4
"""Contexts of one automaton that are blended at a node, the longest first."""
CHAIN = 256
"""Suffixes of a new token whose counts are brought up to date, the longest first: all of them, but in a text that
repeats one token for ever."""
HISTORY_TOKENS = 65_536
"""Tokens of past requests that are kept; the oldest go first, a part at a time."""
HISTORY_PARTS = 4
ROOT_STATE = 0


class SuffixAutomaton:
    """All substrings of a text, with how often each occurs: a state is a set of substrings that end at the same places.

    Attributes (by state): next: state after a token. link: state of the longest suffix that occurs elsewhere too.
        length: of its longest substring. count: occurrences so far. latest: where the last one ends.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.latest = [0]
        self.last = ROOT_STATE

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._add(token)

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of (a context, token) that occurs, as (state, length); a context is given likewise."""
        while state != ROOT_STATE and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        following = self.next[state].get(token)
        return (ROOT_STATE, 0) if following is None else (following, length + 1)

    def suffixes(self, state: int, length: int) -> Iterator[tuple[int, int]]:
        """A context and its own suffixes that occur at more places, the longest first."""
        while state != ROOT_STATE:
            yield state, length
            state = self.link[state]
            length = self.length[state]

    @property
    def repeated(self) -> tuple[int, int]:
        """The longest suffix of the text that occurs earlier too, as (state, length)."""
        state = max(self.link[self.last], ROOT_STATE)
        return state, self.length[state]

    def _add(self, token: int) -> None:
        new = self._state(self.length[self.last] + 1, {}, 0, 0)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state < 0:
            self.link[new] = ROOT_STATE
        else:
            following = self.next[state][token]
            if self.length[following] > self.length[state] + 1:
                following = self._split(state, token, following)
            self.link[new] = following
        self.last = new
        end = self.length[new]
        for _ in range(CHAIN):
            if new == ROOT_STATE:
                break
            self.count[new] += 1
            self.latest[new] = end
            new = self.link[new]

    def _split(self, state: int, token: int, old: int) -> int:
        """The substrings of `old` that are no longer than those of `state` and the token get a state of their own."""
        short = self._state(self.length[state] + 1, dict(self.next[old]), self.count[old], self.latest[old])
        self.link[short] = self.link[old]
        self.link[old] = short
        while state >= 0 and self.next[state].get(token) == old:
            self.next[state][token] = short
            state = self.link[state]
        return short

    def _state(self, length: int, following: dict[int, int], count: int, latest: int) -> int:
        self.next.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.count.append(count)
        self.latest.append(latest)
        return len(self.length) - 1


class History:
    """Replies of past requests, in a few automata of which the oldest is dropped when there are too many tokens."""

    def __init__(self, max_tokens: int = HISTORY_TOKENS) -> None:
        self._part = max(1, max_tokens // HISTORY_PARTS)
        self.parts: deque[SuffixAutomaton] = deque(maxlen=HISTORY_PARTS)
        self._num_texts = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Take in one text; none longer than a part, so that the bound holds."""
        tokens = tokens[: self._part - 1]
        if not self.parts or self.parts[-1].length[self.parts[-1].last] + len(tokens) >= self._part:
            self.parts.append(SuffixAutomaton())
        self._num_texts += 1
        self.parts[-1].extend((*tokens, -self._num_texts))  # no match runs from one text into the next


class _Text:
    """One request's automaton, kept up to date token by token."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.num_tokens = 0

    def follow(self, request: Request) -> SuffixAutomaton:
        self.automaton.extend(request.tokens(self.num_tokens, request.num_tokens))
        self.num_tokens = request.num_tokens
        return self.automaton


Contexts = tuple[tuple[int, int], ...]
"""Where each automaton stands, as (state, length)."""


class Suffix(Drafter):
    """Guesses from the request's own prompt and completion, and, with `share_history`, from past replies of the engine.

    A node's children are what followed its context before. The chance of each blends the longest context's counts with
    those of shorter ones, which take what the longer leaves (as prediction by partial matching does); the tree is the
    likeliest paths.
    """

    name = "suffix"
    needs = Needs(ranks=True)

    def __init__(self, workshop: Workshop) -> None:
        self._texts: dict[int, _Text] = {}
        self._history = History() if workshop.config.share_history else None
        self._weights = Weights(LENGTHS)
        self._outcomes = Outcomes()

    def begin(self, request: Request) -> None:
        self._texts[request.id] = _Text()

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        self._outcomes.observe(commits)

    def grade(self, request: Request) -> int:
        """The length of the longest match; 0 where nothing is to be guessed."""
        return max(length for _, length in self._start(request)[1])

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [self._guess(ask) for ask in asks]

    def end(self, request: Request) -> None:
        self._texts.pop(request.id, None)
        self._outcomes.end(request)
        if self._history is not None and request.finish_reason is not None and request.error is None:
            self._history.add(request.output)

    def _start(self, request: Request) -> tuple[list[SuffixAutomaton], Contexts]:
        """Every automaton there is for this request, and the longest match of the text's end in each."""
        own = self._texts[request.id].follow(request)
        automata, contexts = [own], [own.repeated]
        for part in self._history.parts if self._history is not None else ():
            state, length = ROOT_STATE, 0
            for token in request.tokens(max(0, request.num_tokens - LONGEST), request.num_tokens):
                state, length = part.advance(state, length, token)
            automata.append(part)
            contexts.append((state, length))
        return automata, tuple(contexts)

    def _guess(self, ask: Ask) -> DraftTree:
        automata, contexts = self._start(ask.request)

        def children(contexts: Contexts, depth: int) -> Iterator[tuple[Candidate, Contexts]]:
            for candidate in self._children(automata, contexts, ask.budget.width, depth):
                token = candidate.token
                yield candidate, tuple(a.advance(*c, token) for a, c in zip(automata, contexts, strict=True))

        tree, candidates = likeliest_paths(contexts, ask.budget, children)
        self._outcomes.remember(ask.request, tree, candidates)
        return tree

    def _children(
        self, automata: Sequence[SuffixAutomaton], contexts: Contexts, width: int, depth: int
    ) -> list[Candidate]:
        """The `width` likeliest tokens after a context, likeliest first."""
        chances: dict[int, float] = {}
        lengths: dict[int, int] = {}
        latest: dict[int, int] = {}
        left = 1.0
        for length, index, state in self._suffixes(automata, contexts):
            automaton = automata[index]
            following = [(token, after) for token, after in automaton.next[state].items() if token >= 0]
            total = sum(automaton.count[after] for _, after in following)
            if not total:
                continue
            confidence = CONFIDENCE[bisect_right(LENGTHS, length)]
            for token, after in following:
                chances[token] = chances.get(token, 0.0) + left * confidence * automaton.count[after] / total
                lengths.setdefault(token, length)
                latest.setdefault(token, automaton.latest[after] - index * HISTORY_TOKENS)
            left *= 1.0 - confidence
        best = heapq.nsmallest(width, chances, key=lambda token: (-chances[token], -latest[token]))
        candidates = []
        for rank, token in enumerate(best):
            weight, cell = self._weights.weigh(lengths[token], chances[token], rank, depth)
            candidates.append(Candidate(token, weight, chances[token], rank, cell, self._weights))
        return candidates

    def _suffixes(self, automata: Sequence[SuffixAutomaton], contexts: Contexts) -> list[tuple[int, int, int]]:
        """Contexts to blend as (length, automaton, state), the longest first, the request's own before others'."""
        found = []
        for index, (automaton, context) in enumerate(zip(automata, contexts, strict=True)):
            for _, (state, length) in zip(range(BACKOFF), automaton.suffixes(*context), strict=False):
                found.append((length, index, state))
        return sorted(found, key=lambda entry: (-entry[0], entry[1]))
