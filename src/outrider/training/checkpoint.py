"""Checkpoints of a training run: whole or not there at all, and only for a run of the same settings."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor

from outrider.errors import TrainingError

_IDENTITY = "run.json"
_UNFINISHED = "unfinished"
_SAMPLE = 16
"""Numbers of each tensor that tell one model from another."""


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Tells weights apart by the first numbers of every tensor, in bfloat16: the same on every device."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        start = tensor.detach().flatten()[:_SAMPLE].to(torch.bfloat16)
        digest.update(start.view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


@dataclass(slots=True)
class State:
    """Where a run stands; with the weights, the optimiser and the random states it is all that a run needs to go on.

    Attributes:
        done: optimiser steps. epoch, batches: passes over the corpus, and batches of each process within this one.
        tokens: of all processes. seconds: spent. horizon: steps there will be (None: not known yet).
        curve: what was reported.
    """

    done: int = 0
    epoch: int = 0
    batches: int = 0
    tokens: int = 0
    seconds: float = 0.0
    horizon: int | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        for name, value in held.items():
            setattr(self, name, value)


class Checkpoints:
    """One folder of checkpoints `step-XXXXXXXX`, of which the newest is kept.

    Args:
        identity: settings that decide what a run becomes; a checkpoint of others is refused.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, state: State, identity: Mapping[str, Any]) -> None:
        self._folder, self._accelerator, self._state = folder, accelerator, state
        self._identity = json.loads(json.dumps(dict(identity), default=str))
        accelerator.register_for_checkpointing(state)

    def resume(self) -> bool:
        """Load the newest checkpoint; whether there was one.

        Raises:
            TrainingError: if it is damaged, or of a run with other settings.
        """
        found = sorted(self._folder.glob("step-*"))
        if not found:
            return False
        try:
            held = json.loads((found[-1] / _IDENTITY).read_text())
            differing = sorted(name for name in self._identity if held.get(name) != self._identity[name])
            if differing:
                raise TrainingError(
                    f"{self._folder} holds a run with another {', '.join(differing)}: give the same settings to go on "
                    "with it, or another folder"
                )
            self._accelerator.load_state(str(found[-1]))
        except (OSError, ValueError, RuntimeError, SafetensorError, LookupError, EOFError, pickle.PickleError) as error:
            raise TrainingError(f"the checkpoint {found[-1]} is damaged ({error}): delete it to begin anew") from error
        return True

    def save(self) -> None:
        """Write a checkpoint beside the last one and then take its place.

        Raises:
            TrainingError: if it cannot be written; the last one stays.
        """
        unfinished = self._folder / _UNFINISHED
        is_main = self._accelerator.is_main_process
        try:
            if is_main:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
                (unfinished / _IDENTITY).write_text(json.dumps(self._identity))
            self._accelerator.wait_for_everyone()
            self._accelerator.save_state(str(unfinished))
            self._accelerator.wait_for_everyone()
            if is_main:
                final = self._folder / f"step-{self._state.done:08d}"
                older = [path for path in self._folder.glob("step-*") if path != final]
                shutil.rmtree(final, ignore_errors=True)
                unfinished.rename(final)
                for path in older:
                    shutil.rmtree(path, ignore_errors=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise TrainingError(
                f"no checkpoint could be written to {self._folder} ({error}): free some space and run again, "
                "training goes on from the last one"
            ) from error
