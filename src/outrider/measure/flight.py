"""Cycles in flight: what one takes as the engine runs it, and what its parts take alone on the device."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.pipeline import Pipeline
from outrider.engine.step import Engine
from outrider.errors import ConfigError
from outrider.kernels.graph_pool import GraphPool
from outrider.measure.cycle import Decoding, seconds_of
from outrider.models.graph import as_they_are
from outrider.models.ranks.group import Ranks
from outrider.models.seats import Outline
from outrider.record import Record
from outrider.request import Request, SamplingParams

IN_FLIGHT = "in flight"
"""How a row ran: as graphs on the device, the host one cycle behind."""
COUNTED = 60
"""Cycles of one shape, of which the median counts."""
MOST_OUTLINES = 12
"""Shapes whose parts are measured where control chose several: those that it chose most often."""
PATIENCE = 50
"""Steps within which requests must be in flight."""


@dataclass(frozen=True, slots=True)
class Flew:
    """A decoding cycle as the engine ran it. outline: None where it ran in lockstep."""

    record: Record
    outline: Outline | None
    requests: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a cycle's parts, each alone on the device, and of all of it (`device`)."""

    draft: float
    target: float
    device: float


class Log:
    """Notes the decoding cycles of an engine as it runs, which raises from now on what a drafter does wrong.

    Cycles during which a graph was taken are left out: that time belongs to none.
    """

    def __init__(self, engine: Engine) -> None:
        engine.strict = True
        self._engine = engine
        self._noted: list[Flew] = []
        self._captured = self._num_captured()
        self._is_late = False  # a graph was taken while the cycle that is read next was in the air

    def note(self, record: Record) -> None:
        """To be told of each step, before the next one."""
        captured, was_late = self._num_captured(), self._is_late
        self._captured, self._is_late = captured, captured != self._captured
        if record.cycles and not record.prefill_rows and not (was_late or self._is_late):
            flight = self._engine.pipeline.landed if self._engine.pipeline and record.overlaps else None
            outline = flight.outline if flight else None
            self._noted.append(Flew(record, outline, len(flight.requests if flight else record.cycles)))

    def cycles(self) -> list[Flew]:
        """The decoding cycles since the last call, those that also read prompts left out."""
        noted, self._noted = self._noted, []
        return noted

    def _num_captured(self) -> int:
        return self._engine.pipeline.num_captured if self._engine.pipeline else 0


def flies(cycles: Sequence[Flew], together: int) -> bool:
    """Whether most of these cycles were in flight, and some of them with all requests."""
    flown = [cycle for cycle in cycles if cycle.outline is not None]
    return 2 * len(flown) > len(cycles) and any(cycle.requests == together for cycle in flown)


def parts_of(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    outlines: Sequence[Outline],
    repeats: int = 20,
) -> dict[Outline, Parts]:
    """What the parts of cycles of these outlines take while the prompts' requests are in flight together.

    Raises:
        ConfigError: where they do not fly.
    """
    depth, width = max(o.depth for o in outlines), max(o.width for o in outlines)
    with aloft(engine, prompts, params, depth, width) as (pipeline, requests):
        return {outline: _parts(engine, pipeline, requests, outline, repeats) for outline in outlines}


@contextmanager
def aloft(
    engine: Engine, prompts: Sequence[tuple[int, ...]], params: SamplingParams, depth: int, width: int
) -> Iterator[tuple[Pipeline, list[Request]]]:
    """Requests of these prompts in flight, which always guess so many levels; they are given up afterwards.

    Raises:
        ConfigError: where they do not fly.
    """
    pipeline, room = engine.pipeline, engine.scheduler.max_context
    seed = params.seed or 0
    requests = [Request(n, prompt, params, seed + n, limit=room - len(prompt)) for n, prompt in enumerate(prompts)]
    with engine.always_guessing(depth, width):
        for request in requests:
            engine.add(request)
        try:
            for _ in range(PATIENCE):
                if pipeline is not None and all(pipeline.carries(request) for request in requests):
                    break
                engine.step()
            else:
                raise ConfigError("nothing flies with these settings: time it in lockstep")
            assert pipeline is not None
            yield pipeline, requests
        finally:
            for request in requests:
                engine.abort(request)
            if pipeline is not None:
                pipeline.vacate()


def _parts(engine: Engine, pipeline: Pipeline, requests: Sequence[Request], outline: Outline, repeats: int) -> Parts:
    device, parts = engine.target.device, pipeline.apart(requests, outline)
    ranks = engine.target.lead.ranks if engine.target.lead else None
    runs = {name: replayed(device, part, ranks) for name, part in parts.items() if name != "device"}
    alone = {name: seconds_of(device, run, repeats) for name, run in runs.items()}
    return Parts(alone.get("draft", 0.0), alone["target"], seconds_of(device, parts["device"], repeats))


def replayed(device: torch.device, run: Callable[[], object], ranks: Ranks | None = None) -> Callable[[], object]:
    """The same work as one graph of its own on a GPU; as it is elsewhere.

    ranks: those that take part in it.
    """

    def inferring() -> object:
        with torch.inference_mode():
            return run()

    if device.type != "cuda" or not (ranks is None or ranks.can_be_captured):
        return inferring
    pool = GraphPool()
    with as_they_are():
        pool.warm_up(device, inferring)
        with ranks.keeping() if ranks else nullcontext() as orders:
            graph, kept = pool.capture(device, inferring)

    def replay(kept: object = kept) -> None:  # what the graph writes lives as long as the graph
        with ranks.repeating(orders or ()) if ranks else nullcontext():
            graph.replay()

    return replay


def decoding(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    cycles: Sequence[Flew],
    repeats: int = 20,
) -> Decoding:
    """What these cycles say, which `flies` found in flight with as many requests as there are prompts.

    Tokens are those of all cycles; the parts of a cycle those of the commonest shapes with all requests in flight:
    `cycle` as the engine ran it, `target` and `draft` alone on the device, and `rest` all else.
    """
    whole = [c for c in cycles if c.outline is not None and c.requests == len(prompts)]
    counts = Counter(c.outline for c in whole if c.outline is not None).most_common(MOST_OUTLINES)
    parts = parts_of(engine, prompts, params, [outline for outline, _ in counts], repeats)
    known = [(parts[c.outline], c.record.seconds_total) for c in whole if c.outline in parts]
    means = {name: statistics.fmean(getattr(part, name) for part, _ in known) for name in ("draft", "target", "device")}
    cycle = statistics.fmean(seconds for _, seconds in known)
    told = [request for c in cycles for request in c.record.cycles]
    delivered, flown = sum(r.delivered for r in told), sum(c.outline is not None for c in cycles)
    return Decoding(
        cycles=len(cycles),
        tokens_per_second=delivered / sum(c.record.seconds_total for c in cycles),
        tau=delivered / len(told),
        levels=statistics.fmean(max((r.depth for r in c.record.cycles), default=0) for c in cycles),
        rows=statistics.fmean(c.record.rows for c in cycles),
        cycle=cycle,
        target=means["target"],
        draft=means["draft"],
        rest=cycle - means["target"] - means["draft"],
        alone=means["target"],
        way=IN_FLIGHT,
        in_flight=flown / len(cycles),
        device=means["device"],
    )


def measure_shape(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    depth: int,
    width: int,
    repeats: int = 20,
    counted: int = COUNTED,
) -> Mapping[str, Any]:
    """A cycle whose trees always have `depth` levels of `width` siblings, as the engine runs it, and its parts.

    Raises:
        ConfigError: where nothing flies.
    """
    log = Log(engine)
    with aloft(engine, prompts, params, depth, width) as (pipeline, requests):
        for count in (5, counted):  # graphs are captured, then it counts
            log.cycles()
            for _ in range(count):
                if not any(request.is_finished for request in requests):
                    log.note(engine.step()[1])
        flown = [c for c in log.cycles() if c.outline is not None and c.requests == len(prompts)]
        if not flown or any(request.is_finished for request in requests):
            raise ConfigError("too few cycles were in flight: raise max_context or give shorter prompts")
        outline = Counter(c.outline for c in flown).most_common(1)[0][0]
        assert outline is not None
        cycle = statistics.median(c.record.seconds_total for c in flown if c.outline == outline)
        parts = _parts(engine, pipeline, requests, outline, repeats)
    return {
        "levels": outline.depth,
        "nodes": outline.nodes,
        "cycle": cycle,
        "draft": parts.draft,
        "target": parts.target,
        "rest": cycle - parts.draft - parts.target,
        "device": parts.device,
        "rest_on_device": parts.device - parts.draft - parts.target,
    }
