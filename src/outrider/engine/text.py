"""Token ids to text as they come: UTF-8 edges, stop strings that span cycles, and nothing shown too early."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What a decoder shows for bytes that are no character yet."""


class TextStream:
    """The text of one completion, token by token.

    However its tokens are grouped into cycles, the concatenated `take()`s are the same string, and `text` ends before
    the earliest stop string.

    Args:
        decode: ids to text, leaving special tokens out.
        stops: strings that end the text before themselves. min_tokens: none of them counts before so many tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.text = ""
        self.stopped = False
        self._decode = decode
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._prefix = 0  # ids[prefix:read] give the context in which the next ids are decoded
        self._read = 0
        self._taken = 0

    def push(self, token: int) -> bool:
        """Add one token; True where a stop string is now complete (text is cut before it)."""
        self._ids.append(token)
        return self._grow(final=False)

    def finish(self) -> None:
        """No token follows: bytes that never became a character are shown as the decoder shows them."""
        if not self.stopped:
            self._grow(final=True)

    def take(self, final: bool = False) -> str:
        """The text that is certain by now and was not taken before; what may begin a stop string is held back."""
        end = len(self.text)
        if not (final or self.stopped):
            end -= self._held()
        delta = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return delta

    def _grow(self, final: bool) -> bool:
        # Decoding with the previous ids as context keeps what depends on neighbours (leading spaces) right.
        before = self._decode(self._ids[self._prefix : self._read])
        after = self._decode(self._ids[self._prefix :])
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not final):
            return False
        grown = after[len(before) :]
        self._prefix, self._read = self._read, len(self._ids)
        start = len(self.text)
        self.text += grown
        if len(self._ids) >= self._min_tokens:
            self._cut(start)
        return self.stopped

    def _cut(self, start: int) -> None:
        matches = [self.text.find(stop, max(0, start - len(stop) + 1)) for stop in self._stops]
        found = [match for match in matches if match >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
