"""EAGLE-3's head as a drafter: a tree grown level by level, each node fed with its parent's state.

Source: Li et al., "EAGLE-3" (2503.01840); trees by confidence as EAGLE-2 (2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Needs, Workshop
from outrider.drafters.device import DeviceLevel, last_unread, unread
from outrider.drafters.grow import Line, Scratch
from outrider.drafters.tap_fed import TapFed
from outrider.drafters.trees import Level
from outrider.models.batch import FlatBatch, LevelBatches, tensor_of
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.heads.stage import Rows
from outrider.models.heads.widen import open_artefact
from outrider.models.seats import Crew, DeviceTree, Outline
from outrider.request import Request
from outrider.tree import DraftTree

WIDTH = 4
"""Nodes a level: the fourth guess of a head of this kind is right in some 3 % of the cases."""


class Eagle3(TapFed):
    """Guesses from hidden states of three target layers.

    Raises:
        ModelError: if no head was trained for this target.
    """

    name = "eagle3"
    head: Eagle3Head

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        target, named = workshop.target, workshop.config.drafter_model
        self.head = Eagle3Head(open_artefact(self.name, named, target), target)
        self.needs = Needs(
            stack=(self.head.page,),
            stack_dtype=target.page_dtype,
            scratch_levels=1,
            ranks=True,
            width=WIDTH,
            taps=self.head.taps,
            tokens_on_host=False,
        )
        self.nbytes = self.head.nbytes

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        super().place(target_pages, own_pages, block_size)
        self._batches = LevelBatches(block_size)

    @torch.inference_mode()
    def write(self, batch: FlatBatch, taps: Tensor) -> Tensor | None:
        """See `TapFed.write`."""
        states = self._states(batch, self.head.fuse(taps))
        return states if batch.logit_rows is None else states[batch.logit_rows]

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        passes = [self.write(entries, taps) for entries, taps in self._feed.due(asks)]
        states = torch.cat([found for found in passes if found is not None])
        scratch = Scratch(asks, [Line.of(ask, ask.request.num_tokens) for ask in asks], self._batches)

        def expand(level: Level) -> tuple[Tensor, None]:
            nonlocal states
            device = self._workshop.target.device
            batch = scratch.batch(level, device)
            states = self._states(batch, states.index_select(0, tensor_of(level.origins, np.int64, device)))
            return self.head.logits(states), None

        return self.trees.grow(asks, self.head.logits(states), expand)

    def draft(self, crew: Crew, outline: Outline) -> DeviceTree:
        batch = unread(crew, outline)
        states = self._states(batch, self.head.fuse(self._held.unread(crew, outline.reach)))
        states = states.index_select(0, last_unread(crew, outline))

        def expand(level: DeviceLevel) -> tuple[Tensor, None]:
            nonlocal states
            states = self._states(level.batch(), states.index_select(0, level.origins))
            return self.head.logits(states), None

        return self._on_device.grow(crew, outline, self.head.logits(states), expand)

    def end(self, request: Request) -> None:
        super().end(request)
        self.trees.end(request)

    def _states(self, batch: FlatBatch, features: Tensor) -> Tensor:
        return self.head.states(batch.tokens, features, Rows(batch.positions, batch.slots, batch.keys))
