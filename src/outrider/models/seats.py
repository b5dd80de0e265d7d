"""Where requests stand, on the device: what a cycle reads of each of them and moves on by itself, seat by seat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.base import KeyIndex
from outrider.kernels.tree import Trees, Walks
from outrider.models.batch import FlatBatch

NOTHING = -2
"""The token of a node that is none: no draw is this one, so no walk steps there."""
MUTE = -1
"""The levels of a seat whose drafter does not even read along."""
_LENGTH, _END, _PROMPT, _SEED, _SAMPLE, _LEVELS, _ACCEPTED, _NEWS = range(8)
"""Columns of a seat's numbers; the tokens that its last cycle brought follow from `_NEWS` on."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The fixed shape of all trees of a cycle: it chooses a graph, never a text.

    Attributes:
        depth, width, nodes: of every tree, less where a request may guess less; a chain's width is 1. All 0: no guess.
        reach: most tokens that a request's last cycle brought, which a drafter has yet to read.
    """

    depth: int = 0
    width: int = 1
    nodes: int = 0
    reach: int = 1

    @property
    def is_chain(self) -> bool:
        return self.width == 1


@dataclass(frozen=True, slots=True)
class DeviceTree:
    """The trees of R requests, N nodes each, in topological order.

    Attributes:
        tokens: (R, N) int64, `NOTHING` where there is no node. parents: (R, N) int64, -1 for the first level.
        depths: (R, N) int64, the first level being 1.
        ancestry: (R, N, N) bool, [r, i, j]: node j lies on the path down to node i, which ends with i itself; None for
            chains.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestry: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Crew:
    """R requests of one cycle, read from their seats.

    Attributes:
        index: (R,) int64, their seats. lengths: known tokens n. ends: prompt and limit. prompts: tokens of the prompt.
        seeds: (R,) int64. samples: (R,) int32. heat: (R,) float32, the temperature. levels: most of a guess, or `MUTE`.
        accepted: guesses accepted in the last cycle a. news: (R, K), the tokens that it brought, a + 1 of them.
        tables: (R, B) int32. alive: (R,) bool, something remains to be said.
        most_levels, all else: (R,) int64.
    """

    index: Tensor
    lengths: Tensor
    ends: Tensor
    prompts: Tensor
    seeds: Tensor
    samples: Tensor
    heat: Tensor
    levels: Tensor
    accepted: Tensor
    news: Tensor
    tables: Tensor
    alive: Tensor
    block_size: int

    @property
    def size(self) -> int:
        return self.index.shape[0]

    @property
    def last(self) -> Tensor:
        """(R,) int64: the last known token of each."""
        return self.news.gather(1, self.accepted[:, None])[:, 0]

    @property
    def reads_along(self) -> Tensor:
        """(R,) bool: the drafter has read what was known before the last cycle."""
        return self.alive & (self.levels >= 0)

    def slots(self, places: Tensor) -> Tensor:
        """Slots of (R, X) indices into each one's sequence; those past what is reserved lie in the trash block."""
        columns = (places // self.block_size).clamp(0, self.tables.shape[1] - 1)
        return self.tables.gather(1, columns) * self.block_size + (places % self.block_size).to(torch.int32)

    def batch(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        linear: Tensor,
        tails: Tensor,
        live: Tensor,
        logit_rows: Tensor | None = None,
    ) -> FlatBatch:
        """X rows a request, side by side: all (R, X), tails (R, X, D). Rows that are not `live` only fill the pass:
        they write to slot 0 and see nothing else.
        """
        width = tokens.shape[1]
        owner = torch.arange(self.size * width, dtype=torch.int32, device=tokens.device) // width

        def rows(values: Tensor, fill: int = 0) -> Tensor:
            return torch.where(live, values, fill).to(torch.int32).flatten()

        index = KeyIndex(
            tables=self.tables,
            request=owner,
            linear=rows(linear),
            tails=torch.where(live[:, :, None], tails, 0).to(torch.int32).flatten(0, 1),
            length=rows(positions + 1, 1),
            block_size=self.block_size,
        )
        return FlatBatch(torch.where(live, tokens, 0).flatten(), rows(positions), rows(slots), index, logit_rows)

    def spread(self, values: Tensor, width: int) -> Tensor:
        """(R,) -> (R * width,), the same for each of a request's rows."""
        return values[:, None].expand(-1, width).flatten().contiguous()

    def keys(self, depths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature, seed, sample and output position of rows, (R * X,) each, as the keyed draw takes them.

        depths: (R, X), how many levels below the root's their draws are.
        """
        width = depths.shape[1]
        positions = (self.lengths - self.prompts)[:, None] + depths
        heat, seeds, samples = (self.spread(values, width) for values in (self.heat, self.seeds, self.samples))
        return heat, seeds, samples, positions.to(torch.int32).flatten()


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The target's rows of a cycle: each one's root, then its nodes.

    Attributes:
        slots: (R * N,) int32, of the nodes. depths: (R, N + 1) int64, the root's being 0. live: (R, N + 1) bool.
    """

    batch: FlatBatch
    trees: Trees
    slots: Tensor
    depths: Tensor
    live: Tensor


def tree_rows(crew: Crew, tree: DeviceTree | None, outline: Outline, vocab_size: int) -> TreeRows:
    """Put the last known tokens and the trees into one pass.

    No node stands where its request may not guess: deeper than its levels, past its end, below what is none.
    """
    nodes, device = outline.nodes, crew.lengths.device
    steps = torch.arange(nodes + 1, device=device)
    depths = steps.new_zeros(crew.size, 1)
    tokens, live = crew.last[:, None], crew.alive[:, None]
    if tree is not None:
        depths = torch.cat([depths, tree.depths], dim=1)
        here = (tree.tokens >= 0) & (tree.tokens < vocab_size) & (tree.depths <= crew.levels[:, None])
        here &= live & (crew.lengths[:, None] + tree.depths < crew.ends[:, None])
        here = here.cumprod(1).bool() if tree.ancestry is None else (here[:, None, :] | ~tree.ancestry).all(2)
        live, tokens = torch.cat([live, here], dim=1), torch.cat([tokens, tree.tokens], dim=1)
    # The root's key lies at n - 1, the nodes' behind it whatever their depths.
    slots = crew.slots(crew.lengths[:, None] - 1 + steps)
    batch = crew.batch(
        tokens,
        crew.lengths[:, None] - 1 + depths,
        slots,
        crew.lengths[:, None].expand_as(live),
        _tails(slots, tree, outline),
        live,
    )
    said = torch.where(live, tokens, NOTHING)[:, 1:].flatten()
    parents = (said if tree is None else tree.parents.flatten()).to(torch.int32)
    first = torch.arange(crew.size + 1, dtype=torch.int32, device=device)
    trees = Trees(said, parents, first * nodes, first[:-1] * (nodes + 1), nodes, outline.depth)
    return TreeRows(batch, trees, slots[:, 1:].flatten(), depths, live)


def _tails(slots: Tensor, tree: DeviceTree | None, outline: Outline) -> Tensor:
    """(R, N + 1, D): the slots of the path down to each node; the root has none, and a row reads no more than its own.

    slots: (R, N + 1), the root's first.
    """
    own = slots[:, 1:]
    if tree is None:
        return slots[:, :, None]
    if tree.ancestry is None:
        return own[:, None, :].expand(-1, outline.nodes + 1, -1)
    # A path's nodes in rising order are its nodes from the root down.
    order = torch.arange(outline.nodes, device=slots.device)
    path = torch.where(tree.ancestry, order, outline.nodes).sort(2).values[:, :, : outline.depth]
    path = own.gather(1, path.clamp(max=outline.nodes - 1).flatten(1)).view_as(path)
    return torch.cat([path[:, :1], path], dim=1)


class Seats:
    """A seat for each request that is decoded on the device, and one that nobody ever takes: it fills a crew up.

    Args:
        num_seats: for requests. levels: most of a guess. blocks: most of one request's table.
    """

    def __init__(self, num_seats: int, levels: int, blocks: int, block_size: int, device: torch.device) -> None:
        self.num_seats = num_seats
        self.levels = levels
        self.block_size = block_size
        self.device = device
        self._numbers = torch.zeros(num_seats + 1, _NEWS + levels + 1, dtype=torch.int64, device=device)
        self._heat = torch.zeros(num_seats + 1, device=device)
        self._tables = torch.zeros(num_seats + 1, blocks, dtype=torch.int32, device=device)

    @property
    def empty(self) -> int:
        """The seat that nobody takes."""
        return self.num_seats

    @property
    def most_blocks(self) -> int:
        return self._tables.shape[1]

    def take(
        self, seat: int, *, length: int, end: int, prompt: int, seed: int, sample: int, heat: float, token: int
    ) -> None:
        """A request of `length` known tokens, the last of which is `token`, sits down; it guesses nothing yet."""
        numbers = [length, end, prompt, seed, sample, MUTE, 0, token]
        self._numbers[seat, : len(numbers)] = self._sent(numbers, torch.int64)
        self._heat[seat] = heat
        self._tables[seat] = 0

    def allow(self, seats: Sequence[int], levels: Sequence[int]) -> None:
        """From the next cycle on these seats guess at most so many levels."""
        self._numbers[self._sent(seats, torch.int64), _LEVELS] = self._sent(levels, torch.int64)

    def extend(self, seat: int, start: int, blocks: Sequence[int]) -> None:
        """The seat's table goes on from column `start` with these blocks."""
        self._tables[seat, start : start + len(blocks)] = self._sent(blocks, torch.int32)

    def index(self, seats: Sequence[int]) -> Tensor:
        """(R,) int64 on the device."""
        return self._sent(seats, torch.int64)

    def crew(self, index: Tensor, blocks: int) -> Crew:
        """What is known of the seats `index` (R,), with so many columns of their tables."""
        numbers = self._numbers.index_select(0, index)
        lengths, ends = numbers[:, _LENGTH], numbers[:, _END]
        return Crew(
            index=index,
            lengths=lengths,
            ends=ends,
            prompts=numbers[:, _PROMPT],
            seeds=numbers[:, _SEED].contiguous(),
            samples=numbers[:, _SAMPLE].to(torch.int32),
            heat=self._heat.index_select(0, index),
            levels=numbers[:, _LEVELS],
            accepted=numbers[:, _ACCEPTED],
            news=numbers[:, _NEWS:],
            tables=self._tables[:, :blocks].index_select(0, index),
            alive=lengths < ends,
            block_size=self.block_size,
        )

    def advance(self, crew: Crew, walks: Walks) -> None:
        """The crew's requests have said what their walks say; one whose root had no law stays where it is."""
        said = walks.said
        moved = crew.alive & (said[:, 0] >= 0)
        accepted = torch.where(moved, walks.counts.to(torch.int64), crew.accepted)
        lengths = crew.lengths + torch.where(moved, accepted + 1, 0)
        news = torch.where(moved[:, None], said, crew.news[:, : said.shape[1]])
        self._numbers[:, _LENGTH].index_copy_(0, crew.index, lengths)
        self._numbers[:, _ACCEPTED].index_copy_(0, crew.index, accepted)
        self._numbers[:, _NEWS : _NEWS + said.shape[1]].index_copy_(0, crew.index, news)

    def _sent(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        """On its way to the device, which nobody waits for."""
        made = torch.tensor(values, dtype=dtype)
        return made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made
