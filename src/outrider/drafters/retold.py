"""A request's text in the ids of another tokenizer: its end is told anew as it grows, and what stayed is counted."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.models.lexicon import NOBODY, Lexicon, Piece, special_pairs

KEPT = 48
"""Bytes at the end of a text that are tokenized anew when it grows: few words are longer."""
WINDOW = 2 * KEPT
"""From so many bytes on the window is moved along ..."""
LONGEST = 8 * KEPT
"""... and from so many on to any character, where a text has no spaces."""


class Retold:
    """The ids of one text.

    Where the window that is told anew begins, a word does; its ids are then those that the whole text would have, but
    for tokenizers that look further back than a word.

    Attributes:
        ids: the drafter's. says_end: whether they say how the text ends; its last byte may have no id, as that of a
            character which is yet to be completed.
    """

    def __init__(self, target: Lexicon, drafter: Lexicon) -> None:
        self.ids = list(drafter.opening)
        self.says_end = True
        self._target, self._drafter = target, drafter
        self._specials = special_pairs(target, drafter)
        self._begins = self._is_new = True
        self._window = bytearray()
        self._start = len(self.ids)  # of the window's ids
        self._goes_on = False  # whether text stands before the window

    def extend(self, tokens: Sequence[int]) -> int:
        """Tell what follows, as the target's ids -> how many leading ids are the same as before."""
        start, before = self._start, self.ids[self._start :]
        for token in tokens:
            text = self._target.stands_for[token]
            if text is not None:
                self._window += text.removeprefix(b" ") if self._is_new and self._target.leads else text
                self._is_new = False
            elif not (self._begins and token == self._target.begin):  # the drafter's own opening stands for that
                self._close(token)
            self._begins = False
        self._tell()
        same = 0
        for old, new in zip(before, self.ids[start:], strict=False):
            if old != new:
                break
            same += 1
        return start + same

    def _close(self, special: int) -> None:
        """A special token: what was said before it is settled."""
        self._tell()
        if special in self._specials:
            self.ids.append(self._specials[special])
        self._begin_at(len(self.ids))
        self._is_new = True

    def _begin_at(self, start: int, offset: int | None = None) -> None:
        """The window begins with id `start`, `offset` bytes further on (None: behind all that was said)."""
        del self._window[:offset]
        self._start, self._goes_on = start, offset is not None

    def _tell(self) -> None:
        text = bytes(self._window)
        pieces = self._drafter.spell(text, begins=not self._goes_on)
        if self._goes_on and pieces and not pieces[0][1]:
            pieces = pieces[1:]  # a space that only a text's beginning has
        self.says_end = not pieces or pieces[-1][0] != NOBODY
        self.ids[self._start :] = [number for number, _ in pieces if number != NOBODY]
        if len(text) > WINDOW:
            self._move(text, pieces)

    def _move(self, text: bytes, pieces: Sequence[Piece]) -> None:
        """Let the window begin at the last word, or character, that leaves `KEPT` bytes in it."""
        place, offset = self._start, 0
        found = None
        for number, size in pieces:
            if offset > len(text) - KEPT:
                break
            if offset and (_begins_word(text, offset) or (len(text) > LONGEST and _begins_character(text, offset))):
                found = place, offset
            place += number != NOBODY
            offset += size
        if found is None and len(text) > 4 * LONGEST and self.says_end:
            found = place, offset  # a tokenizer that changed the text does not tell where its pieces end
        if found is not None:
            self._begin_at(*found)


def _begins_word(text: bytes, offset: int) -> bool:
    around = text[offset - 1 : offset + 2]
    return around[1:2] == b" " and not around[:1].isspace() and not around[2:].isspace()


def _begins_character(text: bytes, offset: int) -> bool:
    return text[offset] & 0xC0 != 0x80
