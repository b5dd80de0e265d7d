"""A guess (tokens with parents), how large it may be, and its verdict: pure host data, no tensor of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import lt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ROOT = -1
"""The parent of a first-level node: the last emitted token, whose keys are written in the same pass."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much to guess for one request in this cycle.

    Attributes:
        depth, width, nodes: most levels, children of one node, nodes in all.
        prices: expected tokens that the i-th node must bring to be worth its row of the pass; the last holds for all
            that follow. Empty: every node is wanted. level_price: likewise for one more level of drafting.
        grade: what the drafter said of its guess beforehand (`Drafter.grade`), for the record.
        probes: most probe rows beside the guesses (`Drafter.probe`).
    """

    depth: int = 0
    width: int = 1
    nodes: int = 0
    prices: tuple[float, ...] = ()
    level_price: float = 0.0
    grade: int | None = None
    probes: int = 0

    def price(self, node: int) -> float:
        """Of node `node`, counted from 0."""
        return self.prices[min(node, len(self.prices) - 1)] if self.prices else 0.0


NO_GUESS = Budget()


@dataclass(frozen=True, slots=True)
class DraftTree:
    """N guessed tokens; a chain is a tree that never forks, plain decoding is the empty tree.

    Nodes are in topological order (a parent comes before its children), siblings in the order in which they are
    tried, and siblings carry distinct tokens.

    Attributes:
        tokens: N target token ids.
        parents: N indices into `tokens`, `ROOT` for the first level.
        laws: under the rejection rule, the law each node was drawn from: `(N, V) float32`, one row a node, rows of
            siblings being the parent's law *before* any sibling was removed; `None` means point masses.
        promise: nodes that its drafter expects to be accepted; `None` where it weighs none.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    laws: Tensor | None = field(default=None, compare=False, repr=False)
    promise: float | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def chain(tokens: Sequence[int], laws: Tensor | None = None) -> DraftTree:
        """A tree that never forks."""
        return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), laws)

    def depths(self) -> list[int]:
        """Depth of every node; the first level is 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def children(self, node: int) -> list[int]:
        """The children of a node (or of `ROOT`), in the order in which they are tried."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """Node indices from the first level down to `node`, both included."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @property
    def is_chain(self) -> bool:
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    def fault(self, vocab_size: int) -> str | None:
        """The first law that it breaks, in words: its form, topological order, distinct siblings, the vocabulary."""
        tokens, parents, count = self.tokens, self.parents, len(self.tokens)
        if not count and not parents:
            return None
        # Every tree of every cycle is checked, in a few microseconds; only one that fails is looked at node by node.
        if count == len(parents) and set(map(type, [*tokens, *parents])) == {int}:
            ranked = sorted(tokens)
            in_order = parents == tuple(range(ROOT, count - 1)) or (
                min(parents) >= ROOT
                and all(map(lt, parents, range(count)))
                and (len(set(tokens)) == count or len(set(zip(parents, tokens, strict=True))) == count)
            )
            has_laws = self.laws is None or self.laws.shape == (count, vocab_size)
            if in_order and has_laws and ranked[0] >= 0 and ranked[-1] < vocab_size:
                return None
        return self._find_fault(vocab_size)

    def _find_fault(self, vocab_size: int) -> str:
        count = len(self.tokens)
        if count != len(self.parents):
            return f"{counted(count, 'token')} but {counted(len(self.parents), 'parent')}"
        known: dict[tuple[int, int], int] = {}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if type(token) is not int or type(parent) is not int:
                return f"token {token!r} or parent {parent!r} of node {node} is no int"
            if not 0 <= token < vocab_size:
                return f"token {token} at node {node} is outside the vocabulary of {vocab_size}"
            if not ROOT <= parent < node:
                return f"node {node} names parent {parent}, which does not come before it"
            sibling = known.setdefault((parent, token), node)
            if sibling != node:
                return f"nodes {sibling} and {node} are siblings with the same token"
        shape = None if self.laws is None else tuple(self.laws.shape)
        return f"laws of shape {shape} for {counted(count, 'node')} and a vocabulary of {vocab_size}"


EMPTY_TREE = DraftTree()


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 tree, 2 trees."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target said of one tree.

    Attributes:
        path: accepted node indices, root to leaf.
        tokens: the accepted tokens and, last, the token that the target drew itself; `len(path) + 1` of them.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
