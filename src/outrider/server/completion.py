"""Answers of `/v1/completions`: texts, echoes, and log-probabilities in parallel lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.request import TokenLogprob
from outrider.result import Result
from outrider.server.answer import Answer, Json, Voice, finite
from outrider.server.job import Piece
from outrider.server.prepare import Prepared
from outrider.server.tokens import Offsets


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"

    def __init__(self, voice: Voice, prepared: Prepared, wants_usage: bool = False, echo: bool = False) -> None:
        super().__init__(voice, prepared, wants_usage)
        self.echo = echo

    def choice(self, index: int) -> Json:
        choice = self.choices[index]
        assert choice.result is not None
        text = self._echoed(index) + ("" if self.prepared.is_silent else choice.text)
        logprobs = self._logprobs(index, choice.prompt_logprobs, choice.logprobs)
        return self._json(index, text, logprobs, self._reason(choice.result))

    def parts(self, piece: Piece) -> Iterator[Json]:
        choice = self.choices[piece.index]
        first = choice.offsets is None
        text = (self._echoed(piece.index) if first else "") + ("" if self.prepared.is_silent else piece.text)
        logprobs = self._logprobs(piece.index, piece.prompt_logprobs, piece.logprobs)
        choice.offsets = choice.offsets or Offsets(self.voice.names, self.voice.special.__contains__)
        reason = None if piece.result is None else self._reason(piece.result)
        if text or logprobs or reason or piece.trace:
            yield self._json(piece.index, text, logprobs, reason)

    def _reason(self, result: Result) -> str:
        return "length" if self.prepared.is_silent else result.finish_reason

    def _echoed(self, index: int) -> str:
        return self.prepared.texts[index // self.prepared.params.n] if self.echo else ""

    def _json(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, prompt: Sequence[TokenLogprob | None], rows: Sequence[TokenLogprob]) -> Json | None:
        """Parallel lists over the tokens, those of an echoed prompt first."""
        params, names = self.prepared.params, self.voice.names
        if params.logprobs is None:
            return None
        choice = self.choices[index]
        choice.offsets = choice.offsets or Offsets(names, self.voice.special.__contains__)
        rows = () if self.prepared.is_silent else rows
        ids = [*self.prepared.prompts[index // params.n][: len(prompt)], *(row.token for row in rows)]
        told = [*prompt, *rows]
        return {
            "tokens": [names.name(token) for token in ids],
            "token_logprobs": [None if row is None else finite(row.logprob) for row in told],
            "top_logprobs": [None if row is None else self._top(row) for row in told] if params.logprobs else None,
            "text_offset": choice.offsets.of(ids),
        }

    def _top(self, row: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the one that was said."""
        found: dict[str, float] = {}
        for token, logprob in (*row.top, (row.token, row.logprob)):
            found.setdefault(self.voice.names.name(token), finite(logprob))
        return found
