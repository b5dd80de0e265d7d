"""The flat batch: every row of one forward pass, of all requests, without padding between them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.kernels.base import KeyIndex


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """T rows of one pass; a row is a prompt token, a request's last token, or a node of its draft tree.

    Attributes:
        tokens: (T,) int64. positions: (T,) int32. slots: (T,) int32, where this row's key and value are written.
        keys: where each row finds its keys (its own included, written before it is read).
        logit_rows: (M,) int64, the rows whose logits are asked for, or None for all rows.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    keys: KeyIndex
    logit_rows: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one pass yields.

    Attributes:
        logits: (M, V) float32 for the rows in `logit_rows`, V the model's true vocabulary (padding cut off).
        taps: hidden states (T, H) float32 after the layers asked for, by layer.
    """

    logits: Tensor
    taps: dict[int, Tensor]
