"""Where requests stand, on the device: what a cycle reads of each of them and moves on by itself, seat by seat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.base import Kernels, KeyIndex
from outrider.kernels.places import NOTHING, Relative, Standing
from outrider.kernels.tree import Trees, Walks
from outrider.kernels.warps import Steps, Warps, WarpsRows
from outrider.models.batch import FlatBatch
from outrider.models.laws import Laws

MUTE = -1
"""The levels of a seat whose drafter does not even read along."""
NOWHERE = -(1 << 30)
"""Deeper than this is every row."""
_LENGTH, _END, _PROMPT, _SEED, _SAMPLE, _LEVELS, _ACCEPTED, _NEWS = range(8)
"""Columns of a seat's numbers; the tokens that its last cycle brought follow from `_NEWS` on."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The fixed shape of all trees of a cycle: it chooses a graph, never a text.

    Attributes:
        depth, width, nodes: of every tree, less where a request may guess less; a chain's width is 1. All 0: no guess.
        reach: most tokens of a request that a drafter has yet to read.
        steps: how its rows are warped, None where no law is.
        reads, lags: of a cycle without a guess, what a drafter that is fed from taps does with what was said: reads it,
            or leaves it, and what this cycle brings, for later.
    """

    depth: int = 0
    width: int = 1
    nodes: int = 0
    reach: int = 1
    reads: bool = False
    lags: bool = False
    steps: Steps | None = None

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
        index: (R,) int64, their seats. standing: known tokens n, and where each ends.
        outputs: (R,) int32, tokens of the completion so far. seeds: (R,) int64. samples: (R,) int32.
        heat: (R,) float32, the temperature. levels: (R,) int64, most of a guess, or `MUTE`.
        accepted: (R,) int64, guesses accepted in the last cycle, or one fewer than a drafter that lags has yet to read.
        news: (R, K) int64, the tokens that it brought, which are one more.
        alive: (R,) bool, something remains to be said. reading: (R,) int64, how deep a drafter's rows may be: nowhere
            where it does not read along.
    """

    index: Tensor
    standing: Standing
    outputs: Tensor
    seeds: Tensor
    samples: Tensor
    heat: Tensor
    levels: Tensor
    accepted: Tensor
    news: Tensor
    alive: Tensor
    reading: Tensor
    kernels: Kernels
    vocab_size: int

    @property
    def size(self) -> int:
        return self.index.shape[0]

    @property
    def last(self) -> Tensor:
        """(R,) int64: the last known token of each."""
        return self.news.gather(1, self.accepted[:, None])[:, 0]

    def batch(self, rows: Relative, logit_rows: Tensor | None = None) -> tuple[FlatBatch, Tensor]:
        """A pass over these rows, and the token that each has, `NOTHING` where it only fills the pass: (T,) int64."""
        placed = self.kernels.place(self.standing, rows, self.vocab_size)
        keys = KeyIndex(
            tables=self.standing.tables,
            request=placed.request,
            linear=placed.linear,
            tails=placed.tails,
            length=placed.length,
            block_size=self.standing.block_size,
        )
        return FlatBatch(placed.tokens, placed.positions, placed.slots, keys, logit_rows), placed.named

    def keys(self, width: int, depths: Tensor | int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature, seed, sample and output position of `width` rows a request, (R * width,) each, as the keyed draw
        takes them.

        depths: (R, width), or one for all: how many levels below the root's their draws are.
        """
        positions = self.outputs[:, None].expand(-1, width) + depths
        heat, seeds, samples = (spread(values, width) for values in (self.heat, self.seeds, self.samples))
        return heat, seeds, samples, positions.to(torch.int32).flatten()


def spread(values: Tensor, count: int) -> Tensor:
    """(R, ...) -> (R * count, ...), each row so many times."""
    return values.unsqueeze(1).expand(-1, count, *values.shape[1:]).flatten(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The target's rows of a cycle: each one's root, then its nodes.

    Attributes:
        slots: (R * N,) int32, of the nodes. depths: (R, N + 1) int64, the root's being 0. paths: (R, N + 1, D) int64,
            the nodes down to each, counted from 1; what lies beyond its depth names none.
    """

    batch: FlatBatch
    trees: Trees
    slots: Tensor
    depths: Tensor
    paths: Tensor

    def said(self) -> Tensor:
        """(R * (N + 1), D) int64: the tokens on the way down to each row, its own last."""
        size, width, depth = self.paths.shape
        named = torch.nn.functional.pad(self.trees.tokens.to(torch.int64).view(size, -1), (1, 1), value=NOTHING)
        return named.gather(1, self.paths.reshape(size, -1)).view(size * width, depth)


def tree_rows(crew: Crew, tree: DeviceTree | None, outline: Outline) -> TreeRows:
    """Put the last known tokens and the trees into one pass.

    No node stands where its request may not guess: deeper than its levels, past its end, below what is none.
    """
    nodes, size, device = outline.nodes, crew.size, crew.index.device
    steps = torch.arange(nodes + 1, device=device).expand(size, -1)
    tokens, depths, paths = crew.last[:, None], steps, steps[:, None, 1:].expand(-1, nodes + 1, -1)
    if tree is None:
        paths = steps[:, :, None]
    else:
        tokens = torch.cat([tokens, tree.tokens], dim=1)
        if tree.ancestry is not None:
            depths = torch.nn.functional.pad(tree.depths, (1, 0))
            paths = _paths(tree.ancestry, outline)
    # The root's key lies at n - 1, the nodes' behind it whatever their depths.
    batch, named = crew.batch(Relative(tokens, depths, steps, paths, crew.levels.clamp(min=0)))
    said = _of_nodes(named, size)
    parents = (said if tree is None else tree.parents.flatten()).to(torch.int32)
    first = torch.arange(size + 1, dtype=torch.int32, device=device)
    trees = Trees(said, parents, first * nodes, first[:-1] * (nodes + 1), nodes, outline.depth)
    return TreeRows(batch, trees, _of_nodes(batch.slots, size), depths, paths)


def _of_nodes(values: Tensor, size: int) -> Tensor:
    """(R * (N + 1),) -> (R * N,), without the roots' and side by side, as kernels read them."""
    return values.view(size, -1)[:, 1:].flatten().contiguous()  # of one node each, a flat view would keep the gaps


def _paths(ancestry: Tensor, outline: Outline) -> Tensor:
    """(R, N + 1, D): the places of the path down to each node, the root's being 0, which reads none."""
    # A path's nodes in rising order are its nodes from the root down.
    order = torch.arange(outline.nodes, device=ancestry.device)
    path = torch.where(ancestry, order, outline.nodes).sort(2).values[:, :, : outline.depth] + 1
    return torch.nn.functional.pad(path, (0, 0, 1, 0))


class Seats:
    """A seat for each request that is decoded on the device, and one that nobody ever takes: it fills a crew up.

    Args:
        num_seats: for requests. levels: most of a guess. blocks: most of one request's table.
    """

    def __init__(
        self,
        num_seats: int,
        levels: int,
        blocks: int,
        block_size: int,
        kernels: Kernels,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.num_seats = num_seats
        self.levels = levels
        self.device = device
        self._block_size = block_size
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._numbers = torch.zeros(num_seats + 1, _NEWS + levels + 1, dtype=torch.int64, device=device)
        self._heat = torch.zeros(num_seats + 1, device=device)
        self._tables = torch.zeros(num_seats + 1, blocks, dtype=torch.int32, device=device)
        self.laws = Laws(num_seats + 1, vocab_size, device) if isinstance(kernels, WarpsRows) else None

    @staticmethod
    def bytes_of(num_seats: int, levels: int, blocks: int, vocab_size: int) -> int:
        """What so many seats will take; vocab_size: 0 where their rows are not warped on the device."""
        own = 8 * (_NEWS + levels + 1) + 4 + 4 * blocks
        return (num_seats + 1) * own + (Laws.bytes_of(num_seats + 1, vocab_size) if vocab_size else 0)

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
        self._numbers[seat, : len(numbers)] = self.sent(numbers, torch.int64)
        self._heat[seat] = heat
        self._tables[seat] = 0

    def allow(self, seats: Sequence[int], levels: Sequence[int]) -> None:
        """From the next cycle on these seats guess at most so many levels."""
        self._numbers[self.sent(seats, torch.int64), _LEVELS] = self.sent(levels, torch.int64)

    def extend(self, seat: int, start: int, blocks: Sequence[int]) -> None:
        """The seat's table goes on from column `start` with these blocks."""
        self._tables[seat, start : start + len(blocks)] = self.sent(blocks, torch.int32)

    def index(self, seats: Sequence[int]) -> Tensor:
        """(R,) int64 on the device."""
        return self.sent(seats, torch.int64)

    def crew(self, index: Tensor, blocks: int) -> Crew:
        """What is known of the seats `index` (R,), with so many columns of their tables."""
        numbers = self._numbers.index_select(0, index)
        lengths, ends = numbers[:, _LENGTH].contiguous(), numbers[:, _END].contiguous()
        levels = numbers[:, _LEVELS]
        return Crew(
            index=index,
            standing=Standing(lengths, ends, self._tables[:, :blocks].index_select(0, index), self._block_size),
            outputs=(lengths - numbers[:, _PROMPT]).to(torch.int32),
            seeds=numbers[:, _SEED].contiguous(),
            samples=numbers[:, _SAMPLE].to(torch.int32),
            heat=self._heat.index_select(0, index),
            levels=levels,
            accepted=numbers[:, _ACCEPTED],
            news=numbers[:, _NEWS:],
            alive=lengths < ends,
            reading=torch.where(levels >= 0, -NOWHERE, NOWHERE),
            kernels=self._kernels,
            vocab_size=self._vocab_size,
        )

    def advance(self, crew: Crew, walks: Walks, lags: bool = False, steps: Steps | None = None) -> None:
        """The crew's requests have said what their walks say; one whose root had no law stays where it is.

        steps: how their rows were warped. lags: what they said, a token each, comes behind what was said and not read
        before.
        """
        said = walks.said
        moved = crew.alive & (said[:, 0] >= 0)
        if steps is not None and steps.penalises:
            assert self.laws is not None
            self.laws.count(crew.index, said, moved)
        counts = walks.counts.to(torch.int64)
        lengths = crew.standing.lengths + torch.where(moved, counts + 1, 0)
        accepted = torch.where(moved, crew.accepted + 1 if lags else counts, crew.accepted)
        if lags:
            said = crew.news.scatter(1, accepted[:, None], said)
        news = torch.where(moved[:, None], said, crew.news[:, : said.shape[1]])
        self._numbers[:, _LENGTH].index_copy_(0, crew.index, lengths)
        self._numbers[:, _ACCEPTED].index_copy_(0, crew.index, accepted)
        self._numbers[:, _NEWS : _NEWS + said.shape[1]].index_copy_(0, crew.index, news)

    def warps(self, crew: Crew, rows: TreeRows, steps: Steps) -> Warps:
        """How all rows of a cycle are to be warped."""
        assert self.laws is not None
        return self.laws.warps(crew.index, rows.depths, rows.said() if steps.penalises else None, steps)

    def unmoved(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A run of a cycle behind which all seats stand where they do now, so that it can be run again and again; what
        is penalised there is counted each time.
        """
        kept = self._numbers.clone()

        def run_and_return() -> Tensor:
            told = run()
            self._numbers.copy_(kept)
            return told

        return run_and_return

    def sent(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """On its way to the device, which nobody waits for."""
        made = torch.tensor(values, dtype=dtype)
        return made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made
