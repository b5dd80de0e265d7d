"""From pieces to answers: what the routes have in common; what is ours stands in fields of its own."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.record import Tally
from outrider.request import TokenLogprob
from outrider.result import Result
from outrider.server.errors import of_error
from outrider.server.job import Piece
from outrider.server.prepare import Prepared
from outrider.server.tokens import Offsets, TokenNames
from outrider.server.tools import Call, ToolStream

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Voice:
    """What all answers of a server have in common."""

    model: str
    fingerprint: str
    drafter: str
    names: TokenNames
    special: frozenset[int]


@dataclass(slots=True)
class Choice:
    """One sample as it comes."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    calls: list[Call] = field(default_factory=list)
    tools: ToolStream = field(default_factory=ToolStream)
    offsets: Offsets | None = None
    result: Result | None = None


class Answer(ABC):
    """One HTTP request's answer.

    Args:
        wants_logprobs: whether choices tell them. wants_usage: whether a stream ends in a chunk of usage.
    """

    prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, voice: Voice, prepared: Prepared, wants_usage: bool = False) -> None:
        self.voice = voice
        self.prepared = prepared
        self.wants_usage = wants_usage
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        params = prepared.params
        self.choices = [Choice() for _ in range(len(prepared.prompts) * params.n)]
        self.cycles: list[Json] = []

    @property
    def results(self) -> list[Result]:
        """Of the samples that have ended."""
        return [choice.result for choice in self.choices if choice.result is not None]

    @property
    def num_told(self) -> int:
        """Log-probabilities that the whole answer tells."""
        each = 1 + (self.prepared.params.logprobs or 0)
        return each * sum(len(choice.logprobs) + len(choice.prompt_logprobs) for choice in self.choices)

    def take(self, piece: Piece) -> None:
        """Add a piece to the whole.

        Raises:
            ApiError: the sample failed.
        """
        choice = self.choices[piece.index]
        self._told_by(piece)
        choice.text += piece.text
        choice.logprobs += piece.logprobs
        choice.prompt_logprobs = choice.prompt_logprobs or piece.prompt_logprobs
        choice.result = piece.result
        if piece.trace is not None:
            self.cycles.append(self.cycle(piece))

    def chunks(self, piece: Piece) -> Iterator[Json]:
        """What a stream tells of a piece.

        Raises:
            ApiError: the sample failed.
        """
        self.choices[piece.index].result = piece.result
        self._told_by(piece)
        traced = {} if piece.trace is None else {"speculation": self.cycle(piece)}
        for choice in self.parts(piece):
            yield self.chunk([choice]) | traced
            traced = {}

    def closing(self) -> Iterator[Json]:
        """What a stream tells last."""
        if self.wants_usage:
            yield self.chunk([]) | {"usage": self.usage()}

    def opening(self) -> Iterator[Json]:
        """What a stream tells first."""
        yield from ()

    def whole(self) -> Json:
        """The answer that is no stream."""
        choices = [self.choice(index) for index in range(len(self.choices))]
        return self._frame(self.whole_kind, choices) | {"usage": self.usage()}

    def chunk(self, choices: list[Json]) -> Json:
        """One event of a stream."""
        return self._frame(self.chunk_kind, choices)

    def usage(self) -> Json:
        """OpenAI's counts, and what guessing did: sums over all samples, rates from those sums."""
        results, n = self.results, self.prepared.params.n
        prompt = sum(map(len, self.prepared.prompts))
        completion = 0 if self.prepared.is_silent else sum(result.completion_tokens for result in results)
        cached = sum(result.cached_tokens for result in results[::n])
        tally = Tally()
        for result in results:
            tally.add(result.tally)
        speculation: Json = {
            "drafter": self.voice.drafter,
            "cycles": tally.cycles,
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "accepted_by_position": tally.accepted_by_position,
            "tau": tally.tau,
            "speed_up": tally.saving.to_json(),
        }
        if self.cycles:
            speculation["trace"] = self.cycles
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "speculation": speculation,
        }

    def cycle(self, piece: Piece) -> Json:
        """What one cycle guessed and delivered."""
        assert piece.trace is not None
        depths: list[int] = []
        nodes = []
        for node in piece.trace.nodes:
            depths.append(1 if node.parent < 0 else depths[node.parent] + 1)
            place = {"parent": node.parent, "depth": depths[-1], "p": node.p, "q": node.q, "verdict": node.verdict}
            nodes.append(self.token(node.token) | place)
        return {
            "index": piece.index,
            "tokens": [self.token(token) for token in piece.tokens],
            "accepted": piece.num_accepted,
            "nodes": nodes,
            "drawn": self.token(piece.trace.drawn) | {"p": piece.trace.p},
            "seconds": piece.seconds,
            "speed_up": piece.speed_up,
        }

    def token(self, token: int) -> Json:
        """A token by id, name and bytes."""
        found: Json = {"id": token, "token": self.voice.names.name(token), "bytes": list(self.voice.names.bytes(token))}
        return found | {"special": True} if token in self.voice.special else found

    @abstractmethod
    def choice(self, index: int) -> Json:
        """A whole sample."""

    @abstractmethod
    def parts(self, piece: Piece) -> Iterator[Json]:
        """The choices of a stream's chunks for a piece."""

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.voice.model,
            "system_fingerprint": self.voice.fingerprint,
            "seed": self.prepared.seed,
            "choices": choices,
        } | ({"exactness": self.results[0].exactness} if self.results else {})

    def _told_by(self, piece: Piece) -> None:
        if piece.error is not None:
            raise of_error(piece.error)


def finite(logprob: float) -> float:
    """What JSON can say of a log-probability."""
    return max(logprob, LEAST_LOGPROB)
