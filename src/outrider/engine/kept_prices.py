"""Prices that were measured before, on disk by model, device and versions; a start looks whether they still hold."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.config import EngineConfig, cache_folder
from outrider.control.depth import Control
from outrider.control.prices import Prices
from outrider.drafters.base import Drafter
from outrider.engine.resolved import versions
from outrider.kernels.build import cpu_flags
from outrider.models.target import Target

ENOUGH = 256
"""Passes that must have refined prices before they are kept: a short run knows little that its start did not."""
FORM = 2
"""Of what is kept; prices of 1 counted the taking of graphs as time of cycles."""
MOST = 100
"""Files that are kept, the newest ones."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where the prices of one engine lie. `told` is what they depend on, for who reads the file."""

    path: Path
    told: dict[str, Any]

    @classmethod
    def of(cls, config: EngineConfig, target: Target, drafter: Drafter | None) -> Shelf:
        """Of an engine with these parts on this machine."""
        is_cuda = target.device.type == "cuda"
        device = [torch.cuda.get_device_name(target.device)] if is_cuda else cpu_flags()
        told: dict[str, Any] = {
            "form": FORM,
            "model": [target.name, target.nbytes, target.way, target.dtype, target.numerics, target.fixed_width],
            "ranks": config.tensor_parallel,
            "device": [str(target.device), hashlib.sha256("\0".join(device).encode()).hexdigest()[:16]],
            "kernels": [target.kernels.name, getattr(target.kernels, "threads", torch.get_num_threads())],
            "drafter": [drafter.name, drafter.nbytes, config.exit_layers, config.acceptance] if drafter else [],
            "max_requests": config.max_requests,
            "versions": versions(),
        }
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]
        return cls(cache_folder() / "prices" / f"{digest}.json", told)

    def read(self) -> Prices | None:
        """None where nothing lies there that can be read."""
        try:
            return Prices.of_json(json.loads(self.path.read_text())["prices"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, control: Control) -> None:
        """Keep them where enough was learnt; a folder that cannot be written to is left alone."""
        if control.prices.learnt < ENOUGH:
            return
        folder = self.path.parent
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            # Written beside its place and renamed: another process may read or write it just now.
            handle, name = tempfile.mkstemp(dir=folder, suffix=".writing")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump({"of": self.told, "prices": control.prices.to_json()}, file, indent=1)
                os.replace(name, self.path)
            finally:
                Path(name).unlink(missing_ok=True)
            newest = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in newest[MOST:]:
                path.unlink(missing_ok=True)

    def keep(self, owner: object, control: Control) -> None:
        """Write them when the owner goes, or the process."""
        weakref.finalize(owner, self.write, control)
