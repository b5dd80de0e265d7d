"""Blocks of slots: free, shared by reference count, or kept for the next prompt with the same prefix. No torch."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

TRASH_BLOCK = 0
"""Never allocated: rows that only pad a pass write here."""

Digest = bytes


def digest(parent: Digest, tokens: Sequence[int]) -> Digest:
    """Name of a full block: its tokens and everything before them (128 bits, so that no two prefixes meet)."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Owns every block but the trash block.

    A block is in exactly one of three states: *free*; *held* by at least one table (reference count > 0); or *kept*:
    held by nobody, still carrying the keys of a named prefix, and taken (oldest first) when no block is free.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, TRASH_BLOCK, -1))
        self._refs = [0] * num_blocks
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._by_name: dict[Digest, int] = {}
        self._names: dict[int, Digest] = {}
        self._valid: dict[int, set[str]] = {}

    @property
    def num_available(self) -> int:
        """Blocks that could be allocated now."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        return self.num_blocks - 1 - self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of undefined contents, or None (and nothing changed) where there are not so many."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._kept.popitem(last=False)
                self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each; the last one frees a block, or keeps it where it carries a name."""
        for block in reversed(blocks):  # so that a kept chain is evicted from its tail
            assert self._refs[block] > 0
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._names:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def find(self, name: Digest) -> int | None:
        """The block that carries this prefix."""
        return self._by_name.get(name)

    def share(self, block: int) -> None:
        """Take one more reference of a named block."""
        self._kept.pop(block, None)
        self._refs[block] += 1

    def name(self, block: int, name: Digest) -> None:
        """Say which prefix a full, committed block carries; the first block of a name stays its carrier."""
        if name not in self._by_name and block not in self._names:
            self._by_name[name] = block
            self._names[block] = name
            self._valid[block] = set()

    def mark_valid(self, block: int, stack: str) -> None:
        """A drafter's stack holds valid keys over the whole of this block."""
        if block in self._valid:
            self._valid[block].add(stack)

    def is_valid(self, block: int, stack: str) -> bool:
        return stack in self._valid.get(block, ())

    def _forget(self, block: int) -> None:
        del self._by_name[self._names.pop(block)]
        del self._valid[block]

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that the states are disjoint and complete, and that reference counts equal the tables' references."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._refs, "reference counts differ from the tables"
        free, kept = set(self._free), set(self._kept)
        held = {block for block, refs in enumerate(self._refs) if refs}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(kept) + len(held) == len(free | kept | held), "a block is in two states"
        assert free | kept | held == set(range(TRASH_BLOCK + 1, self.num_blocks)), "a block is lost"
        assert all(self._by_name[name] == block for block, name in self._names.items())
        assert kept <= self._names.keys()
