"""What becomes of draft trees under the match rule: which path holds, and where its keys and values go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.places import PlainPlaceVerbs
from outrider.kernels.sprouts import PlainSproutVerbs


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where the pages of all layers lie, made once a stack, so that one kernel reaches them all.

    Attributes:
        pages: each (S, ...), contiguous, its slots along the first axis.
        addresses: (L,) int64. words: (L,) int32, how many of `word_bytes` (2 or 4) a slot has.
    """

    pages: tuple[Tensor, ...]
    addresses: Tensor
    words: Tensor
    most_words: int
    word_bytes: int

    @staticmethod
    def of(pages: Sequence[Tensor]) -> PageTable:
        """The table of these pages, which lie on one device and stay where they are."""
        assert pages
        assert all(page.is_contiguous() for page in pages)
        slot_bytes = [page.stride(0) * page.element_size() for page in pages]
        word_bytes = 2 if any(size % 4 for size in slot_bytes) else 4
        words = [size // word_bytes for size in slot_bytes]
        device = pages[0].device
        return PageTable(
            tuple(pages),
            torch.tensor([page.data_ptr() for page in pages], dtype=torch.int64, device=device),
            torch.tensor(words, dtype=torch.int32, device=device),
            max(words),
            word_bytes,
        )


@dataclass(frozen=True, slots=True)
class Trees:
    """The draft trees of R requests, one after the other; tokens may be known to the device alone.

    Attributes:
        tokens: (N,) int64. parents: (N,) int32 by place in their own tree, -1 at the root; siblings differ in token.
        first: (R + 1,) int32, where each request's nodes begin. starts: (R,) int32, the row of each request's root
            among the rows that were drawn; node i of the tree is i + 1 rows behind it.
        most_nodes, depth: of the largest tree, and of the deepest.
    """

    tokens: Tensor
    parents: Tensor
    first: Tensor
    starts: Tensor
    most_nodes: int
    depth: int


@dataclass(frozen=True, slots=True)
class Walks:
    """The path of each request that the target's own draws follow.

    Attributes:
        counts: (R,) int32, nodes accepted.
        paths: (R, depth) int32, their places in their own tree, then -1.
        said: (R, depth + 1) int64, their tokens and then the token that the target drew itself, then -1. A path ends
            before a row without a law (a draw of -1); where that is the root's, all of `said` is -1.
    """

    counts: Tensor
    paths: Tensor
    said: Tensor


class PlainTreeVerbs(PlainPlaceVerbs, PlainSproutVerbs):
    """The twins in plain Python and PyTorch; see `Kernels`."""

    def walk(self, draws: Tensor, trees: Trees) -> Walks:
        """See `Kernels.walk`."""
        drawn, tokens, parents = draws.tolist(), trees.tokens.tolist(), trees.parents.tolist()
        first, device = trees.first.tolist(), draws.device
        counts: list[int] = []
        paths: list[list[int]] = []
        said: list[list[int]] = []
        for request, start in enumerate(trees.starts.tolist()):
            base = first[request]
            child = {(parents[i], tokens[i]): i - base for i in range(base, first[request + 1])}
            path, says = [-1], [drawn[start]]
            while (path[-1], says[-1]) in child:
                path.append(child[path[-1], says[-1]])
                says.append(drawn[start + 1 + path[-1]])
            if says[-1] < 0 and len(says) > 1:
                path.pop()
                says.pop()
            counts.append(len(path) - 1)
            paths.append(path[1:] + [-1] * (trees.depth + 1 - len(path)))
            said.append(says + [-1] * (trees.depth + 1 - len(says)))
        return Walks(
            torch.tensor(counts, dtype=torch.int32, device=device),
            torch.tensor(paths, dtype=torch.int32, device=device).view(len(paths), trees.depth),
            torch.tensor(said, dtype=torch.int64, device=device).view(len(said), trees.depth + 1),
        )

    def compact(self, table: PageTable, slots: Tensor, trees: Trees, walks: Walks) -> None:
        """See `Kernels.compact`."""
        first, counts = trees.first.tolist(), walks.counts.tolist()
        source = [first[r] + node for r, path in enumerate(walks.paths.tolist()) for node in path[: counts[r]]]
        target = [first[r] + place for r, count in enumerate(counts) for place in range(count)]
        for pages in table.pages:
            pages[slots[target].long()] = pages[slots[source].long()]  # gathered before anything is written
