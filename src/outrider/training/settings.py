"""What can be set of a training run, and the learning rate that follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.errors import ConfigError

LOSSES = ("hybrid", "forward_kl", "reverse_kl", "jsd", "tv")
OPTIMIZERS = ("muon", "adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run; it is stored in every checkpoint, and a run goes on only with the settings it began with.

    Attributes:
        steps: optimiser steps. seconds: a time limit instead: after `MEASURED_STEPS` steps the speed is measured, and
            the number of steps that fit is set (calls of the `measure` hook come on top); after twice, four times as
            many it is set again, as long as little is done of it. Exactly one of the two is given.
        batch_tokens: positions of one batch of one process, padding included. accumulate: batches a step.
        learning_rate: peak (None: the drafter's own). warmup: share of the steps that it rises in. final_rate: share of
            the peak to which it then falls along a cosine. weight_decay: of every step. clip: of the gradient's norm.
        optimizer: "muon" for the matrices between states, with AdamW for the rest, or "adamw" for all (`optimizers`).
        loss: how far the drafter's law is from the target's (`losses.divergence`). vocabulary: V_d, ids that the
            drafter knows.
        max_length: conversations are cut after so many tokens. held_out: share of prompts kept for evaluation.
        evaluation_tokens: positions of held-out text in one evaluation, at most.
        seed: of weights, order and anchors. chunk: rows scored at once (memory: about 20 bytes x chunk x V).
        fuse: run hot parts by `torch.compile` (None: on a GPU; where that fails, as they are written).
        log_every, evaluate_every, measure_every, checkpoint_every: steps between reports, evaluations on held-out
            text, calls of the `measure` hook (0: only at the end) and checkpoints. checkpoint_seconds: a checkpoint is
            also written when so much time has gone by.
    """

    steps: int | None = None
    seconds: float | None = None
    batch_tokens: int = 32_768
    accumulate: int = 1
    learning_rate: float | None = None
    warmup: float = 0.04
    final_rate: float = 0.0
    optimizer: str = "muon"
    weight_decay: float = 0.0
    clip: float = 1.0
    loss: str = "hybrid"
    vocabulary: int = 16_384
    max_length: int = 1024
    held_out: float = 0.01
    evaluation_tokens: int = 262_144
    seed: int = 0
    chunk: int = 8192
    fuse: bool | None = None
    log_every: int = 20
    evaluate_every: int = 500
    measure_every: int = 0
    checkpoint_every: int = 1000
    checkpoint_seconds: float = 120.0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError("a training run needs one end: give either steps or seconds, not both")
        for name in ("steps", "batch_tokens", "accumulate", "vocabulary", "max_length", "evaluation_tokens", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value!r} is out of range: give a whole number of at least 1")
        for name in ("log_every", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} is out of range: give a number of steps, at least 1")
        for name in ("seed", "measure_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} is out of range: give a whole number of at least 0")
        for name in ("seconds", "learning_rate", "clip", "checkpoint_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r} is out of range: give a number above 0")
        for name in ("weight_decay", "final_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} is out of range: give a number in 0 .. 1")
        if self.loss not in LOSSES:
            raise ConfigError(f"loss={self.loss!r} is unknown: choose one of {', '.join(LOSSES)}")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer={self.optimizer!r} is unknown: choose one of {', '.join(OPTIMIZERS)}")
        if not 0 < self.held_out < 1 or not 0 <= self.warmup < 1:
            raise ConfigError("held_out and warmup are shares: give numbers between 0 and 1")


def rate(config: TrainConfig, done: int, horizon: int | None) -> float:
    """Share of the peak learning rate for the step after `done` ones of `horizon` (None: not known yet, warming up)."""
    if horizon is None:
        return min(1.0, (done + 1) / UNKNOWN_WARMUP)
    rising = max(1, round(config.warmup * horizon))
    if done < rising:
        return (done + 1) / rising
    passed = min(1.0, (done - rising) / max(1, horizon - rising))
    return config.final_rate + (1 - config.final_rate) * (1 + math.cos(math.pi * passed)) / 2


def is_measured(done: int, horizon: int | None) -> bool:
    """Whether a run with a time limit looks at its speed after `done` steps: twice as late each time, as shapes may be
    compiled for longer than one hopes; only in its first fifth, where the learning rate hardly hangs on the horizon.
    """
    doublings, rest = divmod(done, MEASURED_STEPS // 2)
    return doublings > 0 and not rest and doublings.bit_count() == 1 and (horizon is None or 5 * done <= horizon)


MEASURED_STEPS = 40
"""Steps after which the speed of a run with a time limit is first known; the first half compiles most."""
UNKNOWN_WARMUP = 200
"""While it is not, the learning rate rises as if the warm-up took so many steps."""
