"""Spreads what a cycle brought over the time until the next one, so that text flows instead of coming in bursts."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from outrider.server.job import Job, Piece
from outrider.server.tokens import TokenNames

SHARE = 0.9
"""Of the time that a cycle took lately, over which the next burst is spread: a little less, so that none piles up."""


class Pacer:
    """A job's pieces as they come or, with `smooth`, token by token at the pace of its cycles.

    Nothing is held back behind a piece that has arrived meanwhile: a burst that is late is sent at once.
    """

    def __init__(self, job: Job, first: Piece, smooth: bool, names: TokenNames) -> None:
        self._job = job
        self._first = first
        self._smooth = smooth
        self._names = names

    async def __aiter__(self) -> AsyncIterator[Piece]:
        last: dict[int, float] = {}
        pieces = self._all()
        async for piece in pieces:
            now = time.monotonic()
            gap, last[piece.index] = now - last.get(piece.index, now), now
            parts = split(piece, self._names) if self._smooth else [piece]
            for place, part in enumerate(parts):
                if place and not self._job.has_piece:
                    await asyncio.sleep(gap * SHARE / len(parts))
                yield part

    async def _all(self) -> AsyncIterator[Piece]:
        yield self._first
        async for piece in self._job:
            yield piece


def split(piece: Piece, names: TokenNames) -> list[Piece]:
    """One piece a token, together the same text, tokens and log-probabilities; what tells of the whole is on the last.

    Where the text is not the tokens' own (a stop string cut it, or held a part back), all of it is on the last.
    """
    if len(piece.tokens) < 2:
        return [piece]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")
    try:
        texts = [decoder.decode(names.bytes(token)) for token in piece.tokens]
        whole = "".join(texts) == piece.text and not decoder.getstate()[0]
    except UnicodeDecodeError:
        whole = False
    if not whole:
        texts = [*("" for _ in piece.tokens[1:]), piece.text]
    parts = [
        Piece(
            piece.index,
            text,
            (token,),
            int(place < piece.num_accepted),
            piece.logprobs[place : place + 1],
            piece.prompt_logprobs if place == 0 else (),
        )
        for place, (token, text) in enumerate(zip(piece.tokens, texts, strict=True))
    ]
    end = parts[-1]
    return [*parts[:-1], replace(end, trace=piece.trace, seconds=piece.seconds, result=piece.result)]
