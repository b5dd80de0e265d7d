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

from outrider.config import EngineConfig, cache_folder
from outrider.control.choice import DEADLINE, Aim
from outrider.control.cost import PassCost
from outrider.control.depth import Control
from outrider.control.offers import Member
from outrider.control.prices import Prices
from outrider.drafters.base import Drafter
from outrider.engine.rehearsal import pass_cost
from outrider.engine.step import Engine
from outrider.models.target import Target
from outrider.request import Request, SamplingParams

DEPTHS = (0, 0, 0, 0, 1, 2, 4, 8, 1, 2, 4, 8)
"""Of the guesses that are timed: first none, which is what a cycle without guesses takes."""
PATIENCE = 1.0
"""Seconds after which no further guess is timed."""
TIMED_ID = -2
"""No front door gives a request this id."""


def control_of(config: EngineConfig, drafter: Drafter | None, depth: int, width: int, nodes: int) -> Control:
    """Control as it is before anything is known of prices."""
    members = _members(drafter, config.width)
    aim = Aim(config.objective, config.token_deadline or DEADLINE)
    extra_rows = drafter.needs.extra_rows if drafter else 0
    prices = Prices(PassCost({1: 1.0}), len(members))
    return Control(prices, depth, width, nodes, config.adaptive, members, extra_rows, aim)


def _members(drafter: Drafter | None, width: int | None) -> list[Member]:
    """What control knows of a drafter's members. width: most children of one node that the user set, for all."""
    each = drafter.members if drafter else ()
    return [Member(m.needs.ranks, None if width else m.needs.width) for m in each] or [Member()]


def price(engine: Engine, versions: Mapping[str, str]) -> None:
    """Find out what passes and guesses take, or that it is as it was at the last start, and keep it for the next."""
    target, drafter, prices = engine.target, engine.drafter, engine.control.prices
    file = prices_file(target, drafter.name if drafter else "none", versions)
    kept = read_prices(file)
    taps = drafter.needs.taps if drafter else ()
    told = None if kept is None else kept["pass"]
    block_size, context = engine.ledger.block_size, engine.scheduler.max_context
    prices.cost = pass_cost(target, engine.pages, block_size, taps, context, told)
    if kept is not None and len(kept["drafting"]) == len(prices.drafting):
        prices.drafting = Prices.from_json(kept).drafting
    elif drafter is not None and engine.control.adaptive and engine.control.depth:
        time_guesses(engine)
    engine.prices_file = file
    keep_prices(file, prices)


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
    strict, started = engine.strict, time.perf_counter()
    while not request.output and not request.is_finished:
        engine.step()
    deepest = min(max(DEPTHS), engine.control.depth)
    with engine.always_guessing(deepest):
        engine.strict = strict  # a drafter that does wrong is told of, and no reason not to start
        for depth in DEPTHS:
            if request.is_finished or engine.fault is not None or time.perf_counter() - started > PATIENCE:
                break
            engine.control.depth = min(depth, deepest)
            engine.step()
    engine.abort(request)
