"""Which slots belong to which token sequence, as half-open ranges; rollback moves an integer. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.cache.blocks import BlockPool, Digest, digest

TARGET_SEQUENCE = "target"
Key = tuple[int, str]
"""(request id, sequence): stacks of the target's vocabulary share `TARGET_SEQUENCE`; a drafter of another vocabulary
owns a second sequence with its own table and rollback."""


@dataclass(slots=True)
class Span:
    """One sequence's slots, by index in its block table.

    [0, committed)          verified, and valid in the target's stack; between cycles, all known tokens but the last
    [0, seen[stack])        valid in that drafter's stack: may lag behind committed, never leads after a commit
    [committed, drafted)    this cycle's rows: pending tokens, then guesses
    [drafted, reserved)     held, nothing written that anyone may read after this cycle (scratch, spare)
    """

    table: list[int] = field(default_factory=list)
    committed: int = 0
    drafted: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    names: list[Digest] = field(default_factory=list)


class Ledger:
    """The book of all sequences over one pool of blocks."""

    def __init__(self, pool: BlockPool, stacks: Sequence[str] = (), prefix_cache: bool = True) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self._stacks = tuple(stacks)
        self._prefix_cache = prefix_cache
        self._spans: dict[Key, Span] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._spans

    def __getitem__(self, key: Key) -> Span:
        return self._spans[key]

    def open(self, key: Key, tokens: Sequence[int], reuse: bool = True) -> int:
        """Begin a sequence; returns how many leading tokens have their keys already, from blocks of equal prefixes.

        The last token is never among them: its row must run, since its logits are wanted.
        """
        assert key not in self._spans
        span = self._spans[key] = Span(seen=dict.fromkeys(self._stacks, 0))
        size = self.block_size
        name = b""
        leading = dict.fromkeys(self._stacks, True)
        while self._prefix_cache and reuse and span.committed + size < len(tokens):
            name = digest(name, tokens[span.committed : span.committed + size])
            block = self.pool.find(name)
            if block is None:
                break
            self.pool.share(block)
            span.table.append(block)
            span.names.append(name)
            span.committed += size
            for stack in self._stacks:
                leading[stack] = leading[stack] and self.pool.is_valid(block, stack)
                if leading[stack]:
                    span.seen[stack] = span.committed
        span.drafted = span.committed
        return span.committed

    def reserve(self, key: Key, slots: int) -> bool:
        """Hold at least `slots` slots in all; False, and nothing changed, where memory does not suffice."""
        span = self._spans[key]
        missing = -(-slots // self.block_size) - len(span.table)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is None:
                return False
            span.table += blocks
        return True

    def num_missing(self, key: Key, slots: int) -> int:
        """How many blocks `reserve` would have to allocate."""
        return max(0, -(-slots // self.block_size) - len(self._spans[key].table))

    def slots(self, key: Key, start: int, stop: int) -> list[int]:
        """Slot numbers of the indices [start, stop) of a sequence."""
        table, size = self._spans[key].table, self.block_size
        return [table[i // size] * size + i % size for i in range(start, stop)]

    def draft(self, key: Key, rows: int) -> None:
        """This cycle writes `rows` rows after what is committed; they must be reserved."""
        span = self._spans[key]
        span.drafted = span.committed + rows
        assert span.drafted <= len(span.table) * self.block_size

    def fills_block(self, key: Key, committed: int) -> bool:
        """Whether committing so many tokens names a block."""
        return self._prefix_cache and (len(self._spans[key].names) + 1) * self.block_size <= committed

    def commit(self, key: Key, tokens: Sequence[int], committed: int) -> None:
        """The first `committed` tokens of the sequence now have valid keys; everything after is rolled back.

        tokens: the known sequence, at least `committed` of them. Full blocks get their name for reuse, and only where
        there are some (`fills_block`) are the tokens read.
        """
        span = self._spans[key]
        assert span.committed <= committed <= span.drafted
        span.committed = span.drafted = committed
        if not self._prefix_cache:
            return
        size = self.block_size
        while (len(span.names) + 1) * size <= committed:
            index = len(span.names)
            name = digest(span.names[-1] if span.names else b"", tokens[index * size : (index + 1) * size])
            self.pool.name(span.table[index], name)
            span.names.append(name)

    def roll_back(self, key: Key, length: int) -> None:
        """Tokens from `length` on are others now: keys are valid up to there, or up to its block where that has a name.

        For sequences whose tokens may still change, as those of a drafter of another vocabulary. What carries a name is
        never written again: such blocks go back, and may serve whoever begins with the tokens that they are named for.
        """
        span = self._spans[key]
        if span.committed <= length:
            return
        first = length // self.block_size
        if first < len(span.names):
            self.pool.release(span.table[first:])
            del span.table[first:], span.names[first:]
            length = first * self.block_size
        span.committed = span.drafted = length
        span.seen = {stack: min(seen, length) for stack, seen in span.seen.items()}

    def saw(self, key: Key, stack: str, seen: int) -> None:
        """A drafter's stack is valid over the first `seen` tokens; marks whole blocks for reuse."""
        span = self._spans[key]
        assert seen <= span.committed
        for index in range(span.seen[stack] // self.block_size, seen // self.block_size):
            self.pool.mark_valid(span.table[index], stack)
        span.seen[stack] = seen

    def close(self, key: Key) -> None:
        """End a sequence; its blocks return, named ones stay for the next equal prefix."""
        self.pool.release(self._spans.pop(key).table)

    def check(self) -> None:
        """Assert the pool's and the ranges' invariants; called when idle, and by the property tests at every step."""
        self.pool.check([span.table for span in self._spans.values()])
        for span in self._spans.values():
            assert 0 <= span.committed <= span.drafted <= len(span.table) * self.block_size
            assert all(seen <= span.committed for seen in span.seen.values())
