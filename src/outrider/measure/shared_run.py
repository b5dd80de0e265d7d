"""One rank of a measured shape: `python -m outrider.measure.shared_run JOB.json`, under `torchrun` if several share it.

Rank 0 adds a line of JSON to JOB.out for every figure, as soon as it has it, so that a run that is cut off still tells.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from outrider.config import EngineConfig
from outrider.drafters.eagle3 import Eagle3
from outrider.engine.resolve import equip
from outrider.engine.step import Engine
from outrider.measure.bandwidth import measure_bandwidth
from outrider.measure.cycle import answer
from outrider.measure.flight import Flew, Log, parts_of
from outrider.measure.shared import random_part, random_target, read_bytes, write_eagle3
from outrider.measure.synthetic import NOT_VALID, flying
from outrider.models.loader import resolve_device
from outrider.models.ranks.follow import follow
from outrider.models.ranks.meet import meet
from outrider.models.target import Target
from outrider.record import Laps
from outrider.request import SamplingParams

CONTEXT, BLOCK, MOST_ROWS = 1024, 16, 16
"""One request, and no passes that it does not need: fewer kernels are to be compiled."""
PROMPT = tuple(range(5, 21))


def run(job: dict[str, Any]) -> None:
    """Fields: shape, cards, device, tokens (of a reply), depth and tau (of guesses), buffer (bytes; None: enough)."""
    began, cards = time.perf_counter(), job["cards"]
    ranks = meet(cards, job["device"]) if cards > 1 else None
    device = ranks.device if ranks else resolve_device(job["device"])
    part = random_part(job["shape"], device, ranks)
    number = ranks.number() if ranks else 0
    if ranks is not None and not ranks.leads:
        follow(ranks, {number: part})
    target = random_target(part, device, ranks, number)
    tell("made", seconds=time.perf_counter() - began, notes=target.notes, bytes_of_a_rank=target.nbytes)
    limit = measure_bandwidth(device, job["buffer"], repeats=5).bytes_per_second
    nbytes = read_bytes(job["shape"], 2 if part.dtype == "bfloat16" else 4)
    least = nbytes / (limit * cards)
    tell("limit", bytes_per_second=limit, cards=cards, bytes_of_a_pass=nbytes, milliseconds=least * 1e3)
    params = SamplingParams(max_tokens=job["tokens"], ignore_eos=True)
    engine, cycles, token = _plain(target, params, least)
    if job["depth"]:
        with tempfile.TemporaryDirectory() as room:
            guessing = _guessing(target, Path(room) / "head")
        with flying(guessing, job["tau"], job["depth"]):
            chains = _speculative(guessing, params, token)
            _parts(guessing, params, chains, "speculative")
        _same(engine, guessing, job["depth"])
    _parts(engine, params, cycles, "plain")  # behind all else: these need more of the engine than a user does


def tell(what: str, **figures: Any) -> None:
    with Path(sys.argv[1]).with_suffix(".out").open("a") as out:
        out.write(json.dumps({"what": what, **figures}) + "\n")


def _plain(target: Target, params: SamplingParams, least: float) -> tuple[Engine, list[Flew], float]:
    """The last is seconds a token."""
    engine = _engine(target, drafter="none")
    seconds, delivered, cycles = _decoded(engine, params)
    token = seconds / delivered
    flown = sum(cycle.outline is not None for cycle in cycles) / len(cycles)
    rate, share = 1 / token, least / token
    tell("plain", milliseconds=token * 1e3, tokens_per_second=rate, share_of_limit=share, in_flight=flown)
    return engine, cycles, token


def _guessing(target: Target, folder: Path) -> Engine:
    began = time.perf_counter()
    engine = _engine(target, drafter=Eagle3.name, drafter_model=str(write_eagle3(folder, target)), in_flight=2)
    tell("head", seconds=time.perf_counter() - began)
    return engine


def _speculative(engine: Engine, params: SamplingParams, plain: float) -> list[Flew]:
    """plain: seconds a token."""
    seconds, delivered, cycles = _decoded(engine, params)
    token, cycle = seconds / delivered, seconds / len(cycles)
    tell(
        "speculative",
        validity=NOT_VALID,
        milliseconds=token * 1e3,
        tokens_per_second=1 / token,
        ratio=plain / token,
        tau=delivered / len(cycles),
        milliseconds_of_a_cycle=cycle * 1e3,
        cycle_over_plain=cycle / plain,
    )
    return cycles


def _same(plain: Engine, guessing: Engine, depth: int) -> None:
    """Whether texts are the same with guesses and without; a head of random weights is seldom right."""
    said: list[list[list[int]]] = []
    with guessing.always_guessing(depth, 1):
        for engine in (plain, guessing):
            laws = [SamplingParams(max_tokens=32, ignore_eos=True, temperature=heat, seed=1) for heat in (0.0, 1.0)]
            said.append([list(answer(engine, [PROMPT], law)[0].output) for law in laws])
    tell("texts", compared=len(said[0]), differing=sum(a != b for a, b in zip(*said, strict=True)))


def _parts(engine: Engine, params: SamplingParams, cycles: list[Flew], what: str) -> None:
    """What the device takes for such a cycle without the host, and for its halves alone."""
    outlines = Counter(cycle.outline for cycle in cycles if cycle.outline is not None).most_common(1)
    for outline, _ in outlines:
        (parts,) = parts_of(engine, [PROMPT], params, [outline]).values()
        whole = parts.device * 1e3
        tell(f"{what} on the device", milliseconds=whole, draft=parts.draft * 1e3, target=parts.target * 1e3)


def _engine(target: Target, **settings: Any) -> Engine:
    slots, cards = CONTEXT + 4 * BLOCK, target.lead.ranks.size if target.lead else 1
    fixed: dict[str, Any] = {
        "max_context": CONTEXT,
        "max_requests": 1,
        "num_slots": slots,
        "max_rows": MOST_ROWS,
        "tensor_parallel": cards,
    }
    return equip(
        EngineConfig(model=target.name, prefix_cache=False, self_test=False, **fixed, **settings), target, Laps()
    )[0]


def _decoded(engine: Engine, params: SamplingParams) -> tuple[float, int, list[Flew]]:
    """Seconds and tokens of all decoding cycles of one reply, behind one that does not count, and the cycles."""
    log = Log(engine)
    answer(engine, [PROMPT], params)  # kernels are compiled, graphs captured
    log.cycles()
    answer(engine, [PROMPT], params, note=log.note)
    cycles = log.cycles()
    seconds = sum(cycle.record.seconds_total for cycle in cycles)
    return seconds, sum(request.delivered for cycle in cycles for request in cycle.record.cycles), cycles


if __name__ == "__main__":
    with torch.inference_mode():
        run(json.loads(Path(sys.argv[1]).read_text()))
