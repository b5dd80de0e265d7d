"""Grows trees of a fixed outline on the device: no token is read by the host, and no number decides what runs.

A level's best nodes are expanded in one go, and the tree is the best nodes of all levels, as `drafters/trees` grows it;
but how deep it goes, and how many nodes it keeps, is settled beforehand (EAGLE-2, 2406.16858, with static shapes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.base import Ask
from outrider.drafters.weights import FOLLOWER, LEADER, WIDE
from outrider.kernels.base import Kernels
from outrider.kernels.places import NOTHING, Relative
from outrider.kernels.sprouts import Fits, Frontier, Ranked
from outrider.models.batch import BatchBuilder, FlatBatch
from outrider.models.seats import Crew, DeviceTree, Outline

FITS = Fits(LEADER, FOLLOWER, WIDE)
MAX_ROWS = 512
"""Rows of one pass that reads what requests say before they sit down."""


@dataclass(frozen=True, slots=True)
class DeviceLevel:
    """X nodes a request at one depth whose children are wanted.

    Attributes:
        depth: theirs, the first level being 1. tokens: (R, X) int64, `NOTHING` where there is no node.
        origins: (R * X,) int64, each one's parent as a row of the logits before.
        paths: (R, X, depth) int64, which of the scratch places hold the path down to each, its own last.
    """

    crew: Crew
    outline: Outline
    depth: int
    tokens: Tensor
    origins: Tensor
    paths: Tensor

    def batch(self) -> FlatBatch:
        """A pass over the nodes; each sees its request's known tokens and its own path."""
        depths = torch.full((1,), self.depth, device=self.tokens.device).expand_as(self.tokens)
        paths = self.paths + scratch(self.outline)
        rows = Relative(self.tokens, depths, paths[:, :, -1], paths, self.crew.reading)
        return self.crew.batch(rows)[0]


Expand = Callable[[DeviceLevel], tuple[Tensor, Tensor | None]]
"""A level to its logits (R * X, V_d), and, from a drafter that doubts itself, a factor of each row's weights."""


def scratch(outline: Outline) -> int:
    """Where the drafter's own guesses are written, behind the nodes of the tree: from the last known token on."""
    return outline.nodes + 1


def unread(crew: Crew, outline: Outline) -> FlatBatch:
    """A pass over the tokens that each request's last cycle brought, as known ones; logits of the last of each.

    Row i of a request is the token at position n - 1 - a + i, for a guesses accepted, while i <= a.
    """
    steps = torch.arange(outline.reach, device=crew.index.device)
    depths = steps - crew.accepted[:, None]
    rows = Relative(
        crew.news[:, : outline.reach], depths, depths, depths[:, :, None], crew.reading.clamp(max=0), are_known=True
    )
    return crew.batch(rows, last_unread(crew, outline))[0]


def last_unread(crew: Crew, outline: Outline) -> Tensor:
    """(R,) int64: which row of `unread` is the last known token of each."""
    # One whose root had no law may still hold the news of a deeper cycle; nothing comes of it any more.
    accepted = crew.accepted.clamp(max=outline.reach - 1)
    return torch.arange(crew.size, device=crew.index.device) * outline.reach + accepted


def newest(crew: Crew) -> FlatBatch:
    """A pass over the last known token of each request."""
    here = torch.zeros(1, 1, dtype=torch.int64, device=crew.index.device).expand(crew.size, -1)
    return crew.batch(
        Relative(crew.last[:, None], here, here, here[:, :, None], crew.reading.clamp(max=0), are_known=True)
    )[0]


def read_before(asks: Sequence[Ask], starts: Sequence[int], block_size: int, device: torch.device) -> list[FlatBatch]:
    """Passes over all known tokens from `starts` on but the last of each, without logits."""
    passes: list[FlatBatch] = []
    builder = BatchBuilder(block_size)
    for ask, first in zip(asks, starts, strict=True):
        start, stop = first, ask.request.num_tokens - 1
        while start < stop:
            size = min(stop - start, MAX_ROWS - builder.num_rows)
            builder.request(ask.table)
            builder.line(start, ask.request.tokens(start, start + size), 0)
            start += size
            if builder.num_rows == MAX_ROWS:
                passes.append(builder.build(device))
                builder = BatchBuilder(block_size)
    return [*passes, builder.build(device)] if builder.num_rows else passes


class DeviceTrees:
    """Grows the trees of a crew for any drafter with logits, under the very noise that the target will draw with.

    Args:
        kept: (V_d,) ascending target ids of the columns of the logits; None: column c is token c.
    """

    def __init__(self, kernels: Kernels, vocab_size: int, kept: Tensor | None = None) -> None:
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._kept = None if kept is None else kept.to(torch.int64)

    def grow(
        self, crew: Crew, outline: Outline, logits: Tensor, expand: Expand, trust: Tensor | None = None
    ) -> DeviceTree:
        """logits: (R, V_d) float32 after the last known token of each; trust: (R,), as `Expand`."""
        if outline.is_chain:
            return self._chain(crew, outline, logits, expand)
        return self._tree(crew, outline, logits, expand, trust)

    def _chain(self, crew: Crew, outline: Outline, logits: Tensor, expand: Expand) -> DeviceTree:
        device = logits.device
        levels = torch.arange(outline.depth, device=device)
        origins = torch.arange(crew.size, device=device)
        found: list[Tensor] = []
        while True:
            tokens = self._tokens(self._ranked(crew, logits, 1, len(found)).columns)
            found.append(torch.where(found[-1] >= 0, tokens, NOTHING) if found else tokens)
            depth = len(found)
            if depth == outline.depth:
                break
            paths = levels[:depth].expand(crew.size, 1, -1)
            logits, _ = expand(DeviceLevel(crew, outline, depth, found[-1], origins, paths))
        every = levels.expand(crew.size, -1)
        return DeviceTree(torch.cat(found, dim=1), every - 1, every + 1)

    def _tree(self, crew: Crew, outline: Outline, logits: Tensor, expand: Expand, trust: Tensor | None) -> DeviceTree:
        """All candidates of all levels, then the best of them."""
        frontier, names = Frontier.of_roots(crew.size, logits.device), None
        grown: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, weights, parents of each level's candidates: (R, C)
        count = 0
        for depth in range(1, outline.depth + 1):
            ranked = self._ranked(crew, logits, outline.width + 1, depth - 1, trust)
            found = self._kernels.sprout(ranked, frontier, outline.width, crew.heat, FITS, self._kept)
            above = frontier.chosen if names is None else names
            grown.append((found.tokens, found.weights, above[:, :, None].expand(-1, -1, outline.width).flatten(1)))
            if depth == outline.depth:
                break
            frontier, names = found.best, found.best.chosen + count
            count += found.tokens.shape[1]
            level = DeviceLevel(crew, outline, depth, frontier.tokens, frontier.origins, frontier.paths)
            logits, trust = expand(level)
        return _best(grown, outline)

    def _ranked(self, crew: Crew, logits: Tensor, count: int, depth: int, trust: Tensor | None = None) -> Ranked:
        """The best columns of each row by the score of the keyed draw, `depth` levels below the root."""
        logits = logits[:, : self._vocab_size]
        keys = crew.keys(logits.shape[0] // crew.size, depth)
        return Ranked(logits, *self._kernels.rank(logits, count, *keys, self._kept), trust)

    def _tokens(self, columns: Tensor) -> Tensor:
        tokens = columns.clamp(min=0)
        if self._kept is not None:
            tokens = self._kept[tokens]
        return torch.where(columns >= 0, tokens, NOTHING)


def _best(grown: Sequence[tuple[Tensor, Tensor, Tensor]], outline: Outline) -> DeviceTree:
    """The nodes of largest path weight; ties go to the earlier, so that parents come before their children."""
    tokens, weights, parents = (torch.cat(parts, dim=1) for parts in zip(*grown, strict=True))
    of_level = [(depth, part[0].shape[1]) for depth, part in enumerate(grown, start=1)]
    device = tokens.device
    depths = torch.cat([torch.full((count,), depth, device=device) for depth, count in of_level]).expand_as(tokens)
    order = weights.sort(dim=1, descending=True, stable=True).indices
    places = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=device).expand_as(order))
    chosen = order[:, : outline.nodes]
    tokens, depths, parents = tokens.gather(1, chosen), depths.gather(1, chosen), parents.gather(1, chosen)
    parents = torch.where(parents >= 0, places.gather(1, parents.clamp(min=0)), -1)
    return DeviceTree(tokens, parents, depths, _ancestry(parents, outline.depth))


def _ancestry(parents: Tensor, depth: int) -> Tensor:
    """(R, N) -> (R, N, N) bool: see `DeviceTree`."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    step = (parents[:, :, None] == nodes).to(torch.float32)
    reach = step + torch.eye(parents.shape[1], device=parents.device)
    steps = 1
    while steps < depth - 1:
        reach = (reach @ reach).clamp(max=1.0)
        steps *= 2
    return reach > 0
