"""A norm trained for leaving the target early: the target's head over it, after the target's own first layers.

Source: LayerSkip (Elhoushi et al., 2404.16710) trains the exit into the whole model; here it is one vector.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from outrider.cache.pages import Pages
from outrider.models.batch import FlatBatch
from outrider.models.heads.files import Artefact, check_target
from outrider.models.heads.layer import Parts
from outrider.models.target import Target


class ExitNorm:
    """logits = head @ rms(tap after the exit, norm).

    Attributes:
        num_layers: that run. nbytes: of its weights.

    Raises:
        ModelError: if the artefact was trained for another target or is not whole.
    """

    def __init__(self, artefact: Artefact, target: Target) -> None:
        check_target(artefact, target)
        parts = Parts(artefact, target)
        self.num_layers = artefact.size("exit_layers")
        self._norm = parts.floats("norm.weight", parts.hidden)
        self._eps = parts.eps
        self._head = target.model.head_rows(None)
        self._target = target
        self.nbytes = parts.nbytes

    def logits(self, batch: FlatBatch, pages: Pages) -> Tensor:
        """One pass through the first layers -> logits (M, V) float32 of `batch.logit_rows`."""
        silent = replace(batch, logit_rows=batch.tokens[:0])
        (states,) = self._target.forward(silent, pages, self.num_layers, (self.num_layers - 1,)).taps.values()
        if batch.logit_rows is not None:
            states = states[batch.logit_rows]
        return self._head(self._target.kernels.rms_norm(states, self._norm, self._eps))[:, : self._target.vocab_size]
