"""The block drafter: one pass gives the laws of all positions, a tree is grown best-first from them.

Sources: DFlash (2602.06036), DSpark (2607.05147): a low-rank correction by the token before, and a confidence that
tells how far a row is to be trusted; trees from marginals as in CAST (2610.00321).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.base import Ask, Needs, Workshop
from outrider.drafters.device import DeviceLevel, scratch, unread
from outrider.drafters.tap_fed import TapFed
from outrider.drafters.trees import Level
from outrider.kernels.places import Relative
from outrider.models.batch import BatchBuilder, FlatBatch, tensor_of
from outrider.models.heads.block import BlockHead
from outrider.models.heads.parallel import ParallelHead
from outrider.models.heads.stage import Rows
from outrider.models.heads.trunk import Blocks
from outrider.models.heads.widen import open_artefact
from outrider.models.seats import Crew, DeviceTree, Outline, spread
from outrider.request import Request
from outrider.tree import DraftTree

WIDTH = 4
"""Nodes a level; more cost no pass of the head, only its correction."""


class Block(TapFed):
    """Guesses a block of positions at once from hidden states of five target layers.

    Raises:
        ModelError: if no head was trained for this target.
    """

    name = "block"
    head: BlockHead | ParallelHead

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        target, named = workshop.target, workshop.config.drafter_model
        artefact = open_artefact(self.name, named, target)
        looks_back = artefact.config.get("sees") != "both ways"
        self.head = BlockHead(artefact, target) if looks_back else ParallelHead(artefact, target)
        self.needs = Needs(
            stack=self.head.stack,
            stack_dtype=target.page_dtype,
            scratch_levels=0,
            scratch_chain=True,
            scratch_least=self.head.block_size if self.head.whole else 0,
            ranks=True,
            width=WIDTH,
            taps=self.head.taps,
            tokens_on_host=self.head.whole,
            levels=self.head.block_size - self.head.lead,
        )
        self.nbytes = self.head.nbytes

    @torch.inference_mode()
    def write(self, batch: FlatBatch, taps: Tensor) -> None:
        """See `TapFed.write`; a context entry has no state to guess from."""
        self.head.write_context(taps, Rows(batch.positions, batch.slots, batch.keys))

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        for entries, taps in self._feed.due(asks):
            self.write(entries, taps)
        asks = [self._clamped(ask) for ask in asks]
        blocks, starts = self._blocks(asks)
        device = self._workshop.target.device
        first = {id(ask): start for ask, start in zip(asks, starts, strict=True)}
        codes = self.head.no_codes(len(asks))

        def expand(level: Level) -> tuple[Tensor, Sequence[float]]:
            nonlocal codes
            places = tensor_of([first[id(ask)] + level.depth for ask in level.asks], np.int64, device)
            tokens, origins = (tensor_of(part, np.int64, device) for part in (level.tokens, level.origins))
            logits, trust, codes = self.head.corrected(blocks, places, tokens, codes.index_select(0, origins))
            return logits, trust.tolist()

        logits, trust = self.head.anchored(blocks, tensor_of(starts, np.int64, device))
        return self._trees.grow(asks, logits, expand, trust.tolist())

    def draft(self, crew: Crew, outline: Outline) -> DeviceTree:
        self.write(unread(crew, outline), self._held.unread(crew, outline.reach))
        steps = torch.arange(outline.depth, device=crew.index.device).expand(crew.size, -1)
        paths = (steps + scratch(outline))[:, None, :].expand(-1, outline.depth, -1)
        anchors = crew.last[:, None].expand_as(steps).contiguous()
        # A row stands one position before the guess that is to come of it.
        batch, _ = crew.batch(Relative(anchors, steps + 1, steps + scratch(outline), paths, crew.reading))
        starts = torch.arange(crew.size, device=steps.device) * outline.depth
        rows = Rows((batch.positions + self.head.later).clamp(min=0), batch.slots, batch.keys)
        blocks = self.head.blocks(crew.last, starts, rows)
        codes = self.head.no_codes(crew.size)

        def expand(level: DeviceLevel) -> tuple[Tensor, Tensor]:
            nonlocal codes
            places = spread(starts + level.depth, level.tokens.shape[1])
            before, tokens = codes.index_select(0, level.origins), level.tokens.clamp(min=0).flatten()
            logits, trust, codes = self.head.corrected(blocks, places, tokens, before)
            return logits, trust

        logits, trust = self.head.anchored(blocks, starts)
        return self._on_device.grow(crew, outline, logits, expand, trust)

    def end(self, request: Request) -> None:
        super().end(request)
        self._trees.end(request)

    def _clamped(self, ask: Ask) -> Ask:
        """No deeper than a block."""
        depth = min(ask.budget.depth, self.head.block_size - self.head.lead)
        return replace(ask, budget=replace(ask.budget, depth=depth))

    def _blocks(self, asks: Sequence[Ask]) -> tuple[Blocks, list[int]]:
        """One pass over a block an ask; where each one's first row that guesses stands."""
        device = self._workshop.target.device
        builder = BatchBuilder(self._block_size)
        starts = []
        for ask in asks:
            starts.append(builder.num_rows)
            builder.request(ask.table)
            known = ask.request.num_tokens
            (anchor,) = ask.request.tokens(known - 1, known)
            if self.head.whole:
                builder.whole(anchor, known, ask.scratch[: self.head.block_size])
            for row in range(0 if self.head.whole else ask.budget.depth):
                builder.node(anchor, known, ask.scratch[: row + 1])
        batch = builder.build(device)
        at = tensor_of(starts, np.int64, device)
        # A whole block may reach beyond the last position; what stands there is never asked for.
        positions = (batch.positions + self.head.later).clamp(max=self.head.last_position)
        rows = Rows(positions, batch.slots, batch.keys)
        return self.head.blocks(batch.tokens[at], at, rows), [start + self.head.lead for start in starts]
