"""What a training run says of itself: reports while it runs, and what it made."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.training.base import Counts


@dataclass(frozen=True, slots=True)
class Report:
    """How far a run has got.

    Attributes:
        event: "train" (figures over the batches since the last report), "held_out", "measured" (what the `measure` hook
            said) or "note" (a sentence for people).
        done, horizon: steps, and how many there will be (None while the speed of a timed run is being measured).
        seconds: since the run began, earlier parts of a resumed run included. figures: loss, hit and alpha by level,
            tau, tokens_per_second, learning_rate, or the hook's own. note: for people.
    """

    event: str
    done: int
    horizon: int | None
    seconds: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Trained:
    """What training made: the parts of an artefact that training knows.

    Attributes:
        settings: architecture fields for `config.json`. tensors: bfloat16 weights, kept ids. figures: held-out rates at
            the end, coverage of the kept ids, steps, tokens, seconds, parameters. curve: reports as plain dicts.
    """

    drafter: str
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    figures: dict[str, Any]
    curve: list[dict[str, Any]]


class Window:
    """What the batches since the last report showed, on the device until it is read."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._counts: Counts | None = None
        self._tokens = 0
        self._since = time.monotonic()

    def add(self, loss: Tensor, counts: Counts, tokens: int) -> None:
        self._losses.append(loss)
        self._counts = counts if self._counts is None else self._counts + counts
        self._tokens += tokens

    def figures(self, processes: int) -> dict[str, Any]:
        """Read and begin anew; the rates are of this process' batches, the tokens of all."""
        assert self._counts is not None
        loss = torch.stack(self._losses).mean().item()
        now = time.monotonic()
        figures = {
            "loss": loss,
            **self._counts.figures(),
            "tokens_per_second": self._tokens * processes / (now - self._since),
        }
        self._losses, self._counts, self._tokens, self._since = [], None, 0, now
        return figures
