"""Answers of `/v1/chat/completions`: messages, calls of tools, and log-probabilities token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.request import TokenLogprob
from outrider.server.answer import Answer, Json, finite
from outrider.server.job import Piece
from outrider.server.tools import Call


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> Iterator[Json]:
        for index in range(len(self.choices)):
            yield self.chunk([self._json(index, {"role": "assistant", "content": ""})])

    def choice(self, index: int) -> Json:
        choice = self.choices[index]
        assert choice.result is not None
        content: str | None = choice.text
        message: Json = {"role": "assistant", "refusal": None}
        if self.prepared.has_tools:
            said, calls = choice.tools.push(choice.text)
            content = said + choice.tools.finish()
            if calls:
                content = content.strip() or None
                message["tool_calls"] = [call.to_json() for call in calls]
        message["content"] = content
        reason = "tool_calls" if "tool_calls" in message else choice.result.finish_reason
        logprobs = self._logprobs(choice.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def parts(self, piece: Piece) -> Iterator[Json]:
        choice = self.choices[piece.index]
        delta: Json = {}
        text, calls = piece.text, list[Call]()
        if self.prepared.has_tools:
            text, calls = choice.tools.push(piece.text)
            text += choice.tools.finish() if piece.result is not None else ""
        if text:
            delta["content"] = text
        if calls:
            first = len(choice.calls)
            choice.calls += calls
            delta["tool_calls"] = [call.to_json(first + i) for i, call in enumerate(calls)]
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        if delta or logprobs or piece.trace:
            yield self._json(piece.index, delta, logprobs)
        if piece.result is not None:
            reason = "tool_calls" if choice.calls else piece.result.finish_reason
            yield self._json(piece.index, {}, None, reason)

    def _json(self, index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, rows: Sequence[TokenLogprob]) -> Json | None:
        if self.prepared.params.logprobs is None:
            return None
        content = []
        for row in rows:
            top = [self._logprob(token, logprob) for token, logprob in row.top]
            content.append(self._logprob(row.token, row.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _logprob(self, token: int, logprob: float) -> Json:
        names = self.voice.names
        return {"token": names.name(token), "logprob": finite(logprob), "bytes": list(names.bytes(token))}
