"""Prices of passes and guesses, measured at start within seconds and kept on disk for the next one."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.config import cache_folder
from outrider.control.prices import Prices
from outrider.engine.step import Engine
from outrider.models.target import Target
from outrider.request import Request, SamplingParams

DEPTHS = (0, 0, 0, 0, 1, 2, 4, 8, 1, 2, 4, 8)
"""Of the guesses that are timed: first none, which is what a cycle without guesses takes."""
PATIENCE = 1.0
"""Seconds after which no further guess is timed."""
TIMED_ID = -2
"""No front door gives a request this id."""


def prices_file(target: Target, drafter: str, versions: Mapping[str, str]) -> Path:
    """Where the prices of this model, drafter, device and these versions are kept."""
    cuda = target.device.type == "cuda"
    device = torch.cuda.get_device_name(target.device) if cuda else f"{platform.machine()}, {platform.processor()}"
    kernels = [target.kernels.name, getattr(target.kernels, "threads", None), target.fixed_width]
    known = [target.name, target.way, target.dtype, target.nbytes, drafter, device, os.cpu_count(), kernels, versions]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return cache_folder() / "prices" / f"{digest}.json"


def read_prices(path: Path) -> dict[str, Any] | None:
    """What was kept; None where there is nothing that can be used."""
    try:
        told = json.loads(path.read_text())
        Prices.from_json(told)  # a damaged file is as good as none
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return dict(told)


def keep_prices(path: Path, prices: Prices) -> None:
    """Write them in one piece; where that cannot be, the next start measures anew."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w") as file:
            json.dump(prices.to_json(), file)
        os.replace(name, path)
    except OSError:
        return


def time_guesses(engine: Engine) -> None:
    """Decode a few tokens with guesses of several depths, so that control knows what they take before anyone waits."""
    room = engine.scheduler.max_context - 2 * max(DEPTHS) - 2
    size, middle = min(8, room // 4), engine.target.vocab_size // 2
    if size < 1:
        return
    prompt = tuple(range(middle, middle + size)) * 2  # what repeats itself is something to look up, too
    request = Request(TIMED_ID, prompt, SamplingParams(ignore_eos=True), seed=0, limit=room - 2 * size)
    engine.add(request)
    started = time.perf_counter()
    while not request.output and not request.is_finished:
        engine.step()
    for depth in DEPTHS:
        if request.is_finished or time.perf_counter() - started > PATIENCE:
            break
        with engine.always_guessing(min(depth, engine.control.depth)):
            engine.step()
    engine.abort(request)
