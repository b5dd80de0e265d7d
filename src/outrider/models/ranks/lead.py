"""Rank 0's side of a target that ranks share: every pass, and every move of keys, is ordered before it is run here."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.pages import Pages, PageSpec
from outrider.errors import CapacityError
from outrider.kernels.base import Kernels
from outrider.kernels.tree import Trees, Walks
from outrider.models.batch import FlatBatch
from outrider.models.ranks.group import Ranks


@dataclass(frozen=True, slots=True)
class Lead:
    """Orders what the other ranks do for one model. number: the model's, on every rank."""

    ranks: Ranks
    number: int
    kernels: Kernels

    @contextmanager
    def passing(self, batch: FlatBatch, pages: Pages, num_layers: int | None, taps: tuple[int, ...]) -> Iterator[None]:
        """Within the block rank 0 runs its part of a pass, and the others run theirs.

        Raises:
            CapacityError: if this device has no memory left for it; the ranks are out of step then.
        """
        assert isinstance(pages, LedPages)
        keys, rows = batch.keys, batch.logit_rows
        tensors = [batch.tokens, batch.positions, batch.slots]
        tensors += [keys.tables, keys.request, keys.linear, keys.tails, keys.length]
        tensors += [] if rows is None else [rows]
        sizes = tuple(tuple(tensor.shape) for tensor in tensors)
        limit = self.kernels.graph_pool.limit
        words = ("pass", self.number, pages.number, sizes, keys.block_size, num_layers, taps, limit)
        with self.ranks.order(*words, tensors=tensors):
            try:
                yield
            except torch.OutOfMemoryError as error:
                if not self.ranks.speaks:  # whoever takes a graph can do without
                    raise
                raise CapacityError(
                    f"a pass of {batch.num_rows} rows does not fit into the memory of rank 0: lower max_rows"
                ) from error

    def pages(self, layers: list[PageSpec], num_slots: int, dtype: torch.dtype, device: torch.device) -> LedPages:
        """A stack of which every rank has its own heads.

        Raises:
            RankError: if another rank has no memory for it.
        """
        number = self.ranks.number()
        made: LedPages | None = None
        error: Exception | None = None
        with self.ranks.order("pages", number, self.number, num_slots, len(layers), dtype):
            try:
                made = LedPages(self, number, layers, num_slots, dtype, device)
            except RuntimeError as caught:  # PyTorch's word for too little memory, on any device
                error = caught
            error = self.ranks.agree(error)
        if error is not None:
            raise error
        assert made is not None
        weakref.finalize(made, self.ranks.drop, number)
        return made

    def memory(self, free: int) -> int:
        """Free bytes of the rank that has least; `free` on this one."""
        with self.ranks.order("memory"):
            return self.ranks.least(free)


class LedPages(Pages):
    """Rank 0's part of a stack; whatever moves in it moves on every rank."""

    def __init__(
        self,
        lead: Lead,
        number: int,
        layers: list[PageSpec],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers, num_slots, dtype, device)
        self.number = number
        self._ranks = lead.ranks

    def compact(self, source: list[int], target: list[int]) -> None:
        """See `Pages.compact`."""
        if source:
            with self._ranks.order("compact", self.number, source, target):
                super().compact(source, target)

    def follow(self, kernels: Kernels, slots: Tensor, trees: Trees, walks: Walks) -> None:
        """See `Pages.follow`."""
        tensors = [slots, trees.tokens, trees.parents, trees.first, trees.starts, walks.counts, walks.paths, walks.said]
        sizes = tuple(tuple(tensor.shape) for tensor in tensors)
        with self._ranks.order("follow", self.number, sizes, trees.most_nodes, trees.depth, tensors=tensors):
            super().follow(kernels, slots, trees, walks)
