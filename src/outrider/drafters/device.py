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
from outrider.models.batch import BatchBuilder, FlatBatch
from outrider.models.seats import Crew, DeviceTree, Outline

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
            columns, _ = self._ranked(crew, logits, 1, len(found))
            found.append(_below(found[-1], self._tokens(columns)) if found else self._tokens(columns))
            depth = len(found)
            if depth == outline.depth:
                break
            paths = levels[:depth].expand(crew.size, 1, -1)
            logits, _ = expand(DeviceLevel(crew, outline, depth, found[-1], origins, paths))
        every = levels.expand(crew.size, -1)
        return DeviceTree(torch.cat(found, dim=1), every - 1, every + 1)

    def _tree(self, crew: Crew, outline: Outline, logits: Tensor, expand: Expand, trust: Tensor | None) -> DeviceTree:
        """All candidates of all levels, then the best of them."""
        size, width = crew.size, outline.width
        first = torch.arange(size, device=logits.device)[:, None]
        whole = logits.new_ones(size, 1)
        # Of the frontier: weights, names among all candidates, and places of their paths in the scratch slots.
        weights, names, paths = whole, first * 0 - 1, first[:, :, None][:, :, :0]
        grown: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, weights, parents of each level's candidates: (R, C)
        count, level = 0, None
        for depth in range(1, outline.depth + 1):
            tokens, chances = self._children(crew, logits, outline, depth)
            if trust is not None:
                chances = chances * trust[:, None]
            above = weights.shape[1]
            tokens = tokens.view(size, above, width)
            tokens = (tokens if level is None else _below(level.tokens[:, :, None], tokens)).flatten(1)
            found = (weights[:, :, None] * chances.view(size, above, width)).flatten(1)
            grown.append((tokens, found, names[:, :, None].expand(-1, -1, width).flatten(1)))
            if depth == outline.depth:
                break
            weights, best = found.sort(dim=1, descending=True, stable=True)
            weights, best = weights[:, :width], best[:, :width]
            rows = best // width
            own = torch.arange(width, device=best.device).expand(size, -1) + (depth - 1) * width
            paths = torch.cat([paths.gather(1, rows[:, :, None].expand(-1, -1, depth - 1)), own[:, :, None]], dim=2)
            names = best + count
            count += found.shape[1]
            origins = (first * above + rows).flatten()
            level = DeviceLevel(crew, outline, depth, tokens.gather(1, best), origins, paths)
            logits, trust = expand(level)
        return _best(grown, outline)

    def _children(self, crew: Crew, logits: Tensor, outline: Outline, depth: int) -> tuple[Tensor, Tensor]:
        """The likeliest draws of the target a row, and how likely each is: tokens (P, W), chances (P, W).

        As `Candidates.best` without its tables of what became of earlier guesses.
        """
        width = outline.width
        columns, scores = self._ranked(crew, logits, width + 1, depth - 1)
        if columns.shape[1] <= width:  # a vocabulary of a few words
            missing = width + 1 - columns.shape[1]
            columns = torch.nn.functional.pad(columns, (0, missing), value=-1)
            scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        heat, *_ = crew.keys(logits.shape[0] // crew.size, 0)
        heat = heat[:, None]
        scaled = logits[:, : self._vocab_size] / torch.where(heat > 0, heat, 1.0)
        logs = (scaled.gather(1, columns.clamp(min=0)) - torch.logsumexp(scaled, dim=1, keepdim=True)).clamp(max=0.0)
        leader = scores[:, :1]
        gaps = (
            torch.cat([leader - scores[:, 1:2], leader - scores[:, 1:]], dim=1).float().nan_to_num(WIDE).clamp(max=WIDE)
        )
        lead, follow = (
            torch.sigmoid(constant + of_gap * gaps + of_log * logs) for constant, of_gap, of_log in (LEADER, FOLLOWER)
        )
        noisy = torch.cat([lead[:, :1], follow[:, 1:]], dim=1)
        chances = torch.where(heat > 0, noisy, logs.exp()).nan_to_num(0.0)
        chances = torch.where(columns >= 0, chances, 0.0)
        return self._tokens(columns[:, :width]), chances[:, :width]

    def _ranked(self, crew: Crew, logits: Tensor, count: int, depth: int) -> tuple[Tensor, Tensor]:
        """The best columns (P, K) of each row by the score of the keyed draw, and the scores; `depth` levels down."""
        keys = crew.keys(logits.shape[0] // crew.size, depth)
        scores, columns, _ = self._kernels.rank(logits[:, : self._vocab_size], count, *keys, self._kept)
        return columns, scores

    def _tokens(self, columns: Tensor) -> Tensor:
        tokens = columns.clamp(min=0)
        if self._kept is not None:
            tokens = self._kept[tokens]
        return torch.where(columns >= 0, tokens, NOTHING)


def _below(parents: Tensor, tokens: Tensor) -> Tensor:
    """The tokens of children; nothing follows what is none."""
    return torch.where(parents >= 0, tokens, NOTHING)


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
