"""A pass between its launch and its collection, when the host waits for each before the next."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.scheduler import Plan
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Flight:
    """A pass between its launch and its collection.

    Attributes:
        trees, probes: one each a work. starts: the first row of each work in `output.logits`.
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
