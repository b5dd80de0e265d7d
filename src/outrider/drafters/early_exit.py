"""The target's own first layers and its head: drafts without another model or another stack.

Source: the self-speculation of LayerSkip (Elhoushi et al., 2404.16710), without its training.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cache.pages import Pages
from outrider.drafters.base import Ask, Commit, Drafter, Needs, Workshop
from outrider.drafters.grow import Grower
from outrider.errors import ConfigError
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.request import Request
from outrider.tree import DraftTree


class EarlyExit(Drafter):
    """Runs layers [0, n) on its guesses. It reads the target's committed slots and writes only reserved ones; the
    target's own pass writes every layer of every node again.
    """

    name = "early_exit"

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        num_layers = workshop.target.num_layers
        self.num_layers = workshop.config.exit_layers or max(1, num_layers // 3)
        if self.num_layers >= num_layers:
            raise ConfigError(
                f"exit_layers={self.num_layers} leaves nothing to exit from: the target has {num_layers} layers"
            )
        self.needs = Needs(scratch_levels=1, ranks=True, target_layers=self.num_layers)

    def place(self, target_pages: Pages, own_pages: Pages | None, block_size: int) -> None:
        target = self._workshop.target
        self._grower = Grower(
            lambda batch: target.forward(batch, target_pages, num_layers=self.num_layers).logits,
            target.kernels,
            self._workshop.config.acceptance,
            block_size,
            target.vocab_size,
        )

    def observe(self, batch: FlatBatch, output: TargetOutput, commits: Sequence[Commit]) -> None:
        self._grower.observe(commits)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        starts = [ask.request.num_tokens - 1 for ask in asks]
        return self._grower.grow(asks, starts, self._workshop.target.device)

    def end(self, request: Request) -> None:
        self._grower.end(request)
