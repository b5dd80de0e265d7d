"""Medusa's heads as a drafter: one position a head, and a tree of paths chosen by how often such guesses were right.

Source: Cai et al., "Medusa" (2401.10774). What a head says does not depend on the guesses before it, so a level's law
is known before the tree is grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Commit, Drafter, Needs, Workshop
from outrider.drafters.candidates import Candidates
from outrider.drafters.device import DeviceLevel, DeviceTrees, last_unread
from outrider.drafters.tap_fed import HeldTaps
from outrider.drafters.trees import Level, Trees
from outrider.kernels.tree import Walks
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.models.heads.medusa import MedusaHeads
from outrider.models.heads.widen import open_artefact
from outrider.models.seats import Crew, DeviceTree, Outline, TreeRows, spread
from outrider.request import Request
from outrider.tree import DraftTree

WIDTH = 4
"""Nodes a level; more cost nothing but rows of the target's pass."""


class Medusa(Drafter):
    """Guesses from the target's last hidden states; it has no stack, and lags behind nothing.

    Raises:
        ModelError: if no heads were trained for this target.
    """

    name = "medusa"

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        target, named = workshop.target, workshop.config.drafter_model
        self.heads = MedusaHeads(open_artefact(self.name, named, target), target)
        self.needs = Needs(
            ranks=True, width=WIDTH, taps=self.heads.taps, tokens_on_host=False, levels=self.heads.num_heads
        )
        self.nbytes = self.heads.nbytes
        self._taps: dict[int, Tensor] = {}

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        target = self._workshop.target
        candidates = Candidates(target.kernels, target.vocab_size, self.heads.kept_ids, self.heads.rates)
        self._trees = Trees(candidates, self._workshop.config.acceptance)
        self._on_device = DeviceTrees(target.kernels, target.vocab_size, self.heads.kept_ids)

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        """Keep the taps of the last committed token of each request: one row."""
        for commit in commits:
            last = commit.rows[-1]
            self._taps[commit.request.id] = torch.cat([output.taps[layer][last] for layer in self.heads.taps])
        self._trees.observe(commits)

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        asks = [self._clamped(ask) for ask in asks]
        device = self._workshop.target.device
        taps = torch.stack([self._taps[ask.request.id] for ask in asks])
        last = [ask.request.tokens(ask.request.num_tokens - 1, ask.request.num_tokens)[0] for ask in asks]
        deepest = max(ask.budget.depth for ask in asks)
        logits = self.heads.logits(taps, torch.tensor(last, device=device), deepest)
        number = {id(ask): index for index, ask in enumerate(asks)}

        def expand(level: Level) -> tuple[Tensor, None]:
            return logits[[number[id(ask)] for ask in level.asks], level.depth], None

        return self._trees.grow(asks, logits[:, 0], expand)

    def seat(self, num_seats: int, levels: int) -> None:
        self._held = HeldTaps(self.heads.taps, num_seats, levels + 1, self._workshop.target)

    def seat_bytes(self, levels: int) -> int:
        return HeldTaps.bytes_of(self.heads.taps, levels + 1, self._workshop.target)

    def board(self, asks: Sequence[Ask], seats: Sequence[int]) -> None:
        self._held.put(seats, torch.stack([self._taps[ask.request.id] for ask in asks]))

    def draft(self, crew: Crew, outline: Outline) -> DeviceTree:
        taps = self._held.unread(crew, outline.reach).index_select(0, last_unread(crew, outline))
        logits = self.heads.logits(taps, crew.last, outline.depth)

        def expand(level: DeviceLevel) -> tuple[Tensor, None]:
            return spread(logits[:, level.depth], level.tokens.shape[1]), None

        return self._on_device.grow(crew, outline, logits[:, 0], expand)

    def follow(self, crew: Crew, rows: TreeRows, output: TargetOutput, walks: Walks) -> None:
        self._held.follow(crew, rows, output, walks)

    def keep(self, crew: Crew, rows: TreeRows, output: TargetOutput, walks: Walks) -> None:
        self._held.keep(crew, rows, output, walks)

    def leave(self, request: Request, seat: int, unread: int) -> None:
        self._taps[request.id] = self._held.of(seat, unread)[-1]

    def end(self, request: Request) -> None:
        self._taps.pop(request.id, None)
        self._trees.end(request)

    def _clamped(self, ask: Ask) -> Ask:
        """No deeper than there are heads."""
        depth = min(ask.budget.depth, self.heads.num_heads)
        return replace(ask, budget=replace(ask.budget, depth=depth))
