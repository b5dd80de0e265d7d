"""The target's own first layers and its head: drafts without another model or another stack.

Source: the self-speculation of LayerSkip (Elhoushi et al., 2404.16710), without its training, or with as much of it as
one norm before the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Commit, Drafter, Needs, Workshop
from outrider.drafters.device import newest
from outrider.drafters.grow import Grower, Line
from outrider.errors import ConfigError
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.models.heads.exit import ExitNorm
from outrider.models.heads.widen import open_artefact
from outrider.models.seats import Crew, DeviceTree, Outline
from outrider.request import Request
from outrider.tree import DraftTree


class EarlyExit(Drafter):
    """Runs layers [0, n) on its guesses. It reads the target's committed slots and writes only reserved ones; the
    target's own pass writes every layer of every node again.

    Raises:
        ConfigError: if no layer is left to exit from, or a trained norm belongs to another number of layers.
        ModelError: if a trained norm is named that is none, or another target's.
    """

    name = "early_exit"

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        target, config = workshop.target, workshop.config
        num_layers = target.num_layers
        self.num_layers = config.exit_layers or max(1, num_layers // 3)
        self._norm: ExitNorm | None = None
        if config.drafter_model is not None:
            artefact = open_artefact(self.name, config.drafter_model, target)
            self._norm = ExitNorm(artefact, target)
            self.num_layers = self._norm.num_layers
            self.nbytes = self._norm.nbytes
            if config.exit_layers not in (None, self.num_layers):
                raise ConfigError(
                    f"exit_layers={config.exit_layers} differs from the {self.num_layers} layers that the norm in "
                    f"{config.drafter_model} was trained for: leave it out"
                )
        if self.num_layers >= num_layers:
            raise ConfigError(
                f"exit_layers={self.num_layers} leaves nothing to exit from: the target has {num_layers} layers"
            )
        self.needs = Needs(scratch_levels=1, ranks=True, target_layers=self.num_layers, tokens_on_host=False)

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        target, norm = self._workshop.target, self._norm

        @torch.inference_mode()
        def run(batch: FlatBatch) -> Tensor:
            if norm is not None:
                return norm.logits(batch, target_pages)
            return target.forward(batch, target_pages, num_layers=self.num_layers).logits

        self._grower = Grower(
            run,
            target.kernels,
            self._workshop.config.acceptance,
            block_size,
            target.vocab_size,
        )
        self.trees = self._grower.trees

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        self._grower.observe(commits)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        lines = [Line.of(ask, ask.request.num_tokens - 1) for ask in asks]
        return self._grower.grow(asks, lines, self._workshop.target.device)

    def end(self, request: Request) -> None:
        self._grower.end(request)

    def draft(self, crew: Crew, outline: Outline) -> DeviceTree:
        return self._grower.draft(crew, outline, newest(crew))
