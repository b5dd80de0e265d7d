"""A norm for leaving the target early: its own first layers and head, with the RMS norm between them trained.

Source: what LayerSkip (Elhoushi et al., 2404.16710) trains into a whole model, left to one vector.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as project

from outrider.errors import ConfigError
from outrider.training.base import Counts, DraftModule, before, combine
from outrider.training.corpus import Batch
from outrider.training.harvest import Features
from outrider.training.layers import Shape, final_norm, norm


class EarlyExit(DraftModule):
    """Predicts x_{j+1} from the state of position j after `exit_layers` layers.

    Args:
        exit_layers: layers that run (None: a third of the target's). depth: levels of the greedy chain in the counts.

    Raises:
        ConfigError: if nothing is left to exit from.
    """

    learning_rate = 1e-2
    full_vocabulary = True

    def __init__(self, shape: Shape, kept_ids: Tensor, exit_layers: int | None = None, depth: int = 5) -> None:
        super().__init__(shape, kept_ids)
        self.exit_layers = exit_layers or max(1, shape.num_layers // 3)
        if self.exit_layers >= shape.num_layers:
            raise ConfigError(
                f"exit_layers={self.exit_layers} leaves nothing to exit from: the target has {shape.num_layers} layers"
            )
        self.num_levels = depth
        self.taps = (self.exit_layers - 1,)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)

    @classmethod
    def initialise(cls, module: Any, kept_ids: Tensor, **settings: Any) -> Self:
        """Begins as the target's last norm."""
        made = cls(Shape.of(module), kept_ids, **settings).to(module.device)
        with torch.no_grad():
            made.norm.weight.copy_(final_norm(module))
        return made

    def settings(self) -> dict[str, Any]:
        return {"exit_layers": self.exit_layers}

    def loss(self, batch: Batch, features: Features) -> tuple[Tensor, Counts]:
        states = norm(before(features.taps[self.taps[0]], batch.rows, 0), self.norm.weight, self.shape.eps)
        score = features.arithmetic.score(
            lambda state: project(state, features.head, features.bias), (states,), features.law
        )
        return combine([score] * self.num_levels, batch.offsets, [1.0] + [0.0] * (self.num_levels - 1))

    def tensors(self) -> dict[str, Tensor]:
        """The norm alone: its ids are all of the target's."""
        return {name: value for name, value in super().tensors().items() if name != "kept_ids"}
