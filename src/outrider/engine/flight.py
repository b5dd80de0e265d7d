"""A pass between its launch and its collection: in lockstep, and aloft beside others on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.scheduler import Plan
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.models.seats import Outline
from outrider.request import Request
from outrider.tree import Budget, DraftTree


@dataclass(frozen=True, slots=True)
class Flight:
    """A pass between its launch and its collection.

    Attributes:
        trees, probes: one each a work. starts: the first row of each work in `output.logits`.
        seconds_budgets: part of `seconds_draft` that went into grades and budgets.
    """

    plan: Plan
    trees: tuple[DraftTree, ...]
    probes: tuple[DraftTree, ...]
    starts: tuple[int, ...]
    batch: FlatBatch
    output: TargetOutput
    started: float
    seconds_draft: float
    seconds_verify: float
    seconds_budgets: float = 0.0


class Told:
    """What a cycle says, on its way to the host."""

    def __init__(self, results: Tensor) -> None:
        is_far = results.device.type == "cuda"
        self._results = torch.empty(results.shape, dtype=results.dtype, pin_memory=is_far)
        self._results.copy_(results, non_blocking=is_far)  # the next cycle writes over them
        self._event = None
        if is_far:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(results.device))

    def read(self) -> list[list[int]]:
        """Wait for it."""
        if self._event is not None:
            self._event.synchronize()
        told: list[list[int]] = self._results.tolist()
        return told


@dataclass(frozen=True, slots=True)
class Aloft:
    """A cycle between its launch and its collection."""

    requests: tuple[Request, ...]
    outline: Outline
    budgets: Mapping[int, Budget]
    told: Told
    started: float
