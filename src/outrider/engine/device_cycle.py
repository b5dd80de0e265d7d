"""A cycle on the device from the drafter's first level to the tokens said: nothing in it waits for the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.cache.pages import Pages
from outrider.drafters.base import Drafter
from outrider.kernels.graph_pool import GraphPool
from outrider.kernels.warps import WarpsRows
from outrider.models.batch import TargetOutput
from outrider.models.graph import OWN_BYTES, as_they_are
from outrider.models.ranks.group import Ranks
from outrider.models.seats import Crew, Outline, Seats, TreeRows, tree_rows
from outrider.models.target import Target

CREWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Requests of the cycles that are captured; empty seats fill a crew up to the next size."""
LEAST_BLOCKS = 64
"""Columns of the smallest tables that a cycle is captured with; longer ones double."""


class DeviceCycle:
    """Draft, verify, commit: one run of it is a cycle of the requests on some seats.

    On a CPU it runs as it stands here. On a GPU each shape of it is captured once as one graph, and replayed.
    """

    def __init__(self, target: Target, pages: Pages, seats: Seats) -> None:
        self._target = target
        self._pages = pages
        self._seats = seats
        # With other ranks a cycle can be captured where a graph may hold all that passes between devices; what the
        # others do for it is ordered at each replay. Elsewhere only passes are captured, each rank its own.
        self._graphs = None
        if target.device.type == "cuda":
            ranks = target.lead.ranks if target.lead else None
            if ranks is None or ranks.can_be_captured:
                self._graphs = CycleGraphs(target.kernels.graph_pool, ranks)

    @property
    def note(self) -> str | None:
        """What a user should know of the graphs."""
        return self._graphs.note if self._graphs else None

    @property
    def num_captured(self) -> int:
        """Graphs that were taken until now."""
        return self._graphs.num_captured if self._graphs else 0

    def fits(self, num_requests: int, outline: Outline) -> bool:
        """Whether the target takes them without waiting: one that runs at a fixed width takes one pass of it."""
        width = self._target.fixed_width
        if width is None or (self._graphs is None and self._target.device.type == "cpu"):
            return True
        return (_filled(num_requests) if self._graphs else num_requests) * (outline.nodes + 1) <= width

    @torch.inference_mode()
    def run(self, seats: list[int], outline: Outline, blocks: int, drafter: Drafter | None) -> Tensor:
        """Run a cycle of the requests on `seats`, whose tables have at most `blocks` columns in use.

        Returns:
            (R, D + 4) int64, R no less than there are seats: the tokens said, -1 behind the last; how many of them were
            guesses; the tree's nodes; its levels. Where the root had no law the first token is -1, and nothing moved.
            It holds until the next run.
        """
        index, columns = self._shape(seats, blocks)
        if self._graphs is None:
            return self._run(index, outline, columns, drafter)
        size = index.shape[0]
        nobody = self._seats.index([self._seats.empty] * size)
        key = (size, outline, columns, None if drafter is None else drafter.name)
        return self._graphs(key, index, nobody, lambda crew: self._run(crew, outline, columns, drafter))

    @torch.inference_mode()
    def apart(
        self, seats: list[int], outline: Outline, blocks: int, drafter: Drafter | None
    ) -> dict[str, Callable[[], object]]:
        """The target's part of such a cycle and the drafter's, to be run alone by whoever measures them; they move
        nobody on.
        """
        index, columns = self._shape(seats, blocks)
        crew, tree = self._seats.crew(index, columns), None
        parts: dict[str, Callable[[], object]] = {}
        if drafter is not None and outline.depth:
            parts["draft"] = partial(drafter.draft, crew, outline)
            tree = drafter.draft(crew, outline)
        batch, taps = tree_rows(crew, tree, outline).batch, drafter.needs.taps if drafter else ()
        return {**parts, "target": partial(self._target.forward, batch, self._pages, taps=taps)}

    def _shape(self, seats: list[int], blocks: int) -> tuple[Tensor, int]:
        """The seats of a crew, filled up where there are graphs, and how many columns of their tables it reads."""
        if self._graphs is None:
            return self._seats.index(seats), max(1, blocks)
        columns = LEAST_BLOCKS
        while columns < blocks:
            columns *= 2
        filling = [self._seats.empty] * (_filled(len(seats)) - len(seats))
        return self._seats.index([*seats, *filling]), min(columns, self._seats.most_blocks)

    def _run(self, index: Tensor, outline: Outline, blocks: int, drafter: Drafter | None) -> Tensor:
        seats, target, kernels = self._seats, self._target, self._target.kernels
        crew = seats.crew(index, blocks)
        tree = drafter.draft(crew, outline) if drafter is not None and outline.depth else None
        if drafter is not None and outline.reads:
            drafter.read(crew, outline)
        rows = tree_rows(crew, tree, outline)
        output = target.forward(rows.batch, self._pages, taps=drafter.needs.taps if drafter else ())
        walks = kernels.walk(self._draws(crew, rows, output, outline), rows.trees)
        if not outline.is_chain:  # a chain's path lies in line
            self._pages.follow(kernels, rows.slots, rows.trees, walks)
        if drafter is not None and outline.lags:
            drafter.keep(crew, rows, output, walks)
        elif drafter is not None and (outline.depth or outline.reads):
            drafter.follow(crew, rows, output, walks)
        seats.advance(crew, walks, outline.lags, outline.steps)
        guessed = (rows.trees.tokens >= 0).view(crew.size, -1)
        levels = torch.where(guessed, rows.depths[:, 1:], 0).amax(1) if outline.nodes else torch.zeros_like(index)
        told = [walks.counts.to(torch.int64), guessed.sum(1), levels]
        return torch.cat([walks.said, torch.stack(told, dim=1)], dim=1)

    def _draws(self, crew: Crew, rows: TreeRows, output: TargetOutput, outline: Outline) -> Tensor:
        """(R * (N + 1),) int64: what the target says behind each row."""
        kernels, logits = self._target.kernels, output.logits
        if outline.steps is not None:
            assert isinstance(kernels, WarpsRows)
            logits = kernels.warp(logits, self._seats.warps(crew, rows, outline.steps))
        return kernels.draw(logits, *crew.keys(outline.nodes + 1, rows.depths))


def _filled(num_requests: int) -> int:
    """The size of the crew that so many requests are filled up to."""
    return next((size for size in CREWS if size >= num_requests), num_requests)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Captured:
    """A graph with the tensor of seats that it reads and the one that it writes; what other ranks do at a replay."""

    graph: Any
    index: Tensor
    results: Tensor
    orders: Sequence[bytes] = ()


class CycleGraphs:
    """Runs cycles by replaying them, within the memory planned for graphs: those that were used longest ago give way.
    Where a capture fails, cycles run as they are from then on, and `note` tells why.

    Args:
        pool: shared with the graphs of passes. ranks: those that share the target, None for a whole one.
    """

    def __init__(self, pool: GraphPool, ranks: Ranks | None = None) -> None:
        self.pool = pool
        self._ranks = ranks
        self.note: str | None = None
        self.num_captured = 0
        self._gave_up = False
        self._captured: dict[Any, _Captured] = {}
        self._refused: set[Any] = set()

    def __call__(self, key: Any, index: Tensor, nobody: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """What `run(index)` gives. nobody: seats of the same number that are empty, whose cycles move nothing."""
        if self._gave_up or not self.pool.limit:
            return run(index)
        found = self._captured.pop(key, None)
        fresh = found is None
        if found is None and key not in self._refused:
            try:
                with as_they_are():
                    found = self._take(nobody.clone(), run)
            except torch.OutOfMemoryError:  # others took what was planned
                self.note = "some cycles run without a CUDA graph, slower: the device has no memory left for one"
            except RuntimeError as error:  # whatever CUDA or a module's own operations refuse while a graph is taken
                reason = str(error).strip().splitlines() or [type(error).__name__]
                self.note, self._gave_up = f"cycles run without a CUDA graph, slower: {reason[0]}", True
                logging.getLogger("outrider").warning("%s", self.note)
                self._captured.clear()
        if found is None:
            self._refused.add(key)
            return run(index)
        self.num_captured += fresh
        self._captured[key] = found  # behind those that were used before it
        with self._ranks.repeating(found.orders) if self._ranks else nullcontext():
            found.index.copy_(index)
            found.graph.replay()
        return found.results

    def _take(self, index: Tensor, run: Callable[[Tensor], Tensor]) -> _Captured | None:
        """A graph of this cycle, tried and captured over empty seats; None where the pool has no room for it."""
        pool, device = self.pool, index.device
        nbytes = pool.warm_up(device, partial(run, index)) + OWN_BYTES
        if not pool.make_room(device, nbytes, self._captured):
            self.note = (
                f"some cycles run without a CUDA graph, slower: one of {index.shape[0]} requests may take "
                f"{nbytes / 2**20:.0f} MiB and {pool.limit / 2**20:.0f} MiB are planned for all"
            )
            return None
        with pool.counted(device):
            found = self._capture(index, run)
        pool.keep(found)
        return found

    def _capture(self, index: Tensor, run: Callable[[Tensor], Tensor]) -> _Captured:
        none: list[bytes] = []
        keeping: AbstractContextManager[list[bytes]] = self._ranks.keeping() if self._ranks else nullcontext(none)
        with keeping as orders:
            graph, results = self.pool.capture(index.device, partial(run, index))
        return _Captured(graph, index, results, tuple(orders))
