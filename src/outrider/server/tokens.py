"""How single tokens are shown: their bytes, a readable name, and where each begins in a text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from functools import lru_cache


class TokenNames:
    """Names of a vocabulary's tokens.

    Args:
        spell: token id to its bytes; a special token's are its name.
    """

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        self.bytes = lru_cache(maxsize=65536)(spell)

    def name(self, token: int) -> str:
        """Its text; of one that is no whole character, OpenAI's `bytes:\\xe2\\x80`."""
        spelled = self.bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class Offsets:
    """Where tokens begin in the text that they make, counted in characters; a character counts once it is whole."""

    def __init__(self, names: TokenNames, is_special: Callable[[int], bool]) -> None:
        self._names = names
        self._is_special = is_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0

    def of(self, tokens: Iterable[int]) -> list[int]:
        """The offset of each of the next tokens; special ones take no room."""
        found = []
        for token in tokens:
            spelled = b"" if self._is_special(token) else self._names.bytes(token)
            if spelled and spelled[0] & 0xC0 != 0x80:  # it begins a character: what was pending never became one
                self._length += len(self._decoder.decode(b"", final=True))
            found.append(self._length)
            self._length += len(self._decoder.decode(spelled))
        return found
