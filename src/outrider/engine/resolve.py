"""Every "auto" decided, with its reason; then the engine put together from its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from outrider.cache.blocks import BlockPool
from outrider.cache.ledger import Ledger
from outrider.cache.pages import Pages
from outrider.config import EngineConfig
from outrider.control.cost import PassCost
from outrider.control.depth import DEEPEST, Control
from outrider.control.objective import objective_of
from outrider.drafters.base import Drafter, Needs, Workshop
from outrider.drafters.cascade import build
from outrider.engine.drafter_probe import doubts_of, probe_drafter
from outrider.engine.kept_prices import Shelf
from outrider.engine.memory import MemoryPlan, Room, Wishes, plan_memory, slot_bytes
from outrider.engine.rehearsal import pass_bytes, prices_of, take_graphs
from outrider.engine.resolved import Resolved, versions
from outrider.engine.scheduler import Scheduler
from outrider.engine.seating import seating, seats_bytes
from outrider.engine.step import Engine
from outrider.errors import ConfigError
from outrider.models.heads import files
from outrider.models.loader import load
from outrider.models.ranks.load import load_shared
from outrider.models.target import Target
from outrider.record import Laps
from outrider.registry import READ_BY, reads

DEFAULT_DRAFTER = "ngram"
"""Needs no weights, no memory and no training, and is silent where it has nothing to say."""
TRAINED_DRAFTER = "ngram+small_model"
"""Where a small model was trained for the target: the fastest that was measured on a CPU (docs/measurements.md)."""
IN_FLIGHT = 2
"""Cycles on a GPU at once: one runs while the host reads the one before."""


def assemble(config: EngineConfig, progress: Callable[[str, int, int], None] | None = None) -> tuple[Engine, Resolved]:
    """Load the target, then `equip` it.

    Raises:
        OutriderError: one sentence with its remedy.
    """
    laps = Laps()
    read = load if config.tensor_parallel == 1 else partial(load_shared, config.tensor_parallel)
    target = read(
        config.model,
        dtype=config.dtype,
        device=config.device,
        kernels=config.kernels,
        threads=config.threads,
        pass_width=config.pass_width,
        self_test=config.self_test,
        widen=config.widen,
        progress=progress,
        laps=laps,
    )
    return equip(config, target, laps)


def equip(config: EngineConfig, target: Target, laps: Laps) -> tuple[Engine, Resolved]:
    """Build the drafter, plan memory, measure what a pass costs, and put the engine together around a target.

    Raises:
        OutriderError: one sentence with its remedy.
    """
    reasons: dict[str, str] = {}
    _refuse(config, target)
    drafter = _drafter(config, target, reasons)
    laps.end("drafter")
    depth = _depth(config, reasons) if drafter else 0
    width = _width(config, drafter, reasons)
    nodes = config.nodes or depth * width
    max_context = _context(config, target, reasons)
    needs = drafter.needs if drafter else Needs()
    memory = _plan(config, target, drafter, (depth, width, nodes), max_context)
    nodes, depth = min(nodes, memory.nodes), min(depth, nodes, memory.nodes)
    laps.end("memory plan")
    wish = objective_of(config.objective, config.pace)
    control = Control(PassCost({1: 1.0}), depth, width, nodes, config.adaptive, needs.ranks, needs.extra_rows, wish)
    engine = _engine(config, target, drafter, control, max_context, memory)
    laps.end("graphs and prices of passes")
    doubts, found, told = None, None, drafter.notes if drafter else ()
    if config.self_test and drafter is not None and drafter.nbytes:
        doubts = doubts_of(target, drafter, config.drafter_model)
        found = probe_drafter(engine, doubts)
        laps.end("check of the drafter")
    resolved = Resolved(
        model=target.name,
        way=target.way,
        dtype=target.dtype,
        numerics=target.numerics,
        device=str(target.device),
        tensor_parallel=config.tensor_parallel,
        kernels=target.kernels.name,
        fixed_width=target.fixed_width,
        drafter=drafter.name if drafter else "none",
        depth=depth,
        width=width,
        nodes=nodes,
        adaptive=config.adaptive,
        objective=config.objective,
        acceptance=config.acceptance,
        exactness=target.exactness if config.acceptance == "match" else "distribution",
        max_context=max_context,
        max_requests=config.max_requests,
        max_rows=memory.max_rows,
        block_size=config.block_size,
        prefix_cache=config.prefix_cache,
        in_flight=_in_flight(config, target, drafter),
        memory=memory,
        pass_seconds=engine.control.cost.table(),
        start=laps.seconds,
        versions=versions(),
        probe=None if target.report is None else asdict(target.report),
        drafter_probe=None if found is None else asdict(found),
        reasons=reasons,
        notes=(*target.all_notes, *told, *([memory.note] if memory.note else ()), *(doubts or ())),
    )
    return engine, resolved


def _plan(
    config: EngineConfig, target: Target, drafter: Drafter | None, trees: tuple[int, int, int], max_context: int
) -> MemoryPlan:
    """Memory for the target's stack and the drafter's, which share the numbers of their slots, and for all else."""
    needs = drafter.needs if drafter else Needs()
    seats = seats_bytes(target, drafter, config.max_requests, *seating(drafter, *trees, max_context, config.block_size))
    wishes = Wishes(
        target=target.nbytes,
        drafter=drafter.nbytes if drafter else 0,
        target_slot=slot_bytes(target.page_specs, target.page_dtype),
        drafter_slot=slot_bytes(needs.stack, needs.stack_dtype or target.page_dtype),
        num_slots=config.num_slots,
        block_size=config.block_size,
        max_context=max_context,
        max_requests=config.max_requests,
        max_rows=config.max_rows,
        nodes=trees[-1] + needs.extra_rows,
        ranks=needs.ranks,
        vocab_size=target.vocab_size,
        seats=seats if _in_flight(config, target, drafter) else 0,
    )
    room = Room.of(target.device, config.memory_share, asked=config.num_slots is not None)
    room = room if target.lead is None else room.least(target.lead.memory(room.free))
    plan = plan_memory(wishes, room, pass_bytes(target, config.block_size, max_context, needs.taps))
    target.kernels.graph_pool.limit = plan.graphs
    return plan


def _engine(
    config: EngineConfig,
    target: Target,
    drafter: Drafter | None,
    control: Control,
    max_context: int,
    memory: MemoryPlan,
) -> Engine:
    needs, num_slots = drafter.needs if drafter else Needs(), memory.slots
    pages = target.make_pages(num_slots)
    if drafter:
        own_pages = None
        if needs.stack:
            own_pages = Pages(list(needs.stack), num_slots, needs.stack_dtype or target.page_dtype, target.device)
        drafter.place(pages, own_pages, config.block_size)
    stacks = (drafter.name,) if drafter and needs.stack else ()
    ledger = Ledger(BlockPool(num_slots // config.block_size, config.block_size), stacks, config.prefix_cache)
    take_graphs(target, pages, memory.max_rows, config.block_size, needs.taps)
    shelf = Shelf.of(config, target, drafter)
    control.prices = prices_of(target, pages, config.block_size, needs.taps, shelf.read(), memory.max_rows)
    scheduler = Scheduler(ledger, needs, config.max_requests, memory.max_rows, max_context)
    in_flight = _in_flight(config, target, drafter)
    engine = Engine(target, pages, scheduler, drafter, control, config.acceptance, in_flight)
    shelf.keep(engine, control)
    return engine


def _context(config: EngineConfig, target: Target, reasons: dict[str, str]) -> int:
    """Positions that one request may use."""
    if config.max_context is not None:
        return config.max_context
    if config.num_slots is None:
        return target.max_positions
    spare = 2 * config.block_size  # as `plan_memory` counts: the trash block, and one for guesses
    room = config.num_slots // config.block_size * config.block_size - spare
    if room < 2:
        raise ConfigError(
            f"num_slots={config.num_slots} holds no request beside {spare} slots that are spare: "
            f"raise it to {spare + max(2, config.block_size)} or more, or lower block_size"
        )
    if room < target.max_positions:
        reasons["max_context"] = "all that num_slots holds"
    return min(target.max_positions, room)


def _in_flight(config: EngineConfig, target: Target, drafter: Drafter | None) -> int:
    """Cycles on the device at once."""
    if drafter and drafter.needs.tokens_on_host:
        return 0
    if config.in_flight is not None:
        return config.in_flight
    return IN_FLIGHT if target.device.type == "cuda" else 0


def _refuse(config: EngineConfig, target: Target) -> None:
    """Settings that would not do what they say."""
    if config.max_context is not None and config.max_context > target.max_positions:
        raise ConfigError(
            f"max_context={config.max_context} exceeds the model's {target.max_positions} positions: lower it"
        )


def _drafter(config: EngineConfig, target: Target, reasons: dict[str, str]) -> Drafter | None:
    name = config.drafter
    if name == "auto":
        name, reasons["drafter"] = _choice(config, target)
    for setting, readers in READ_BY.items():
        if getattr(config, setting) and not reads(setting, name):
            raise ConfigError(f"{setting} is read by {', '.join(readers)}, not by {name!r}: leave one out")
    if name == "none":
        return None
    return build(name, Workshop(target, config))


def _choice(config: EngineConfig, target: Target) -> tuple[str, str]:
    """The drafter where none is named, and why."""
    if config.drafter_model is None:
        if target.device.type == "cpu" and files.find("small_model", target):
            return TRAINED_DRAFTER, "a small model for this target comes along; the fastest on a CPU"
        return DEFAULT_DRAFTER, "needs no weights and no memory"
    if (folder := files.trained(config.drafter_model)) is None:
        return READ_BY["drafter_model"][0], "a drafter model is named"
    return files.kind(folder), "what the named weights were trained for"


def _depth(config: EngineConfig, reasons: dict[str, str]) -> int:
    if config.depth is not None:
        return config.depth
    reasons["depth"] = "control chooses up to this in every cycle"
    return DEEPEST


def _width(config: EngineConfig, drafter: Drafter | None, reasons: dict[str, str]) -> int:
    own = drafter.needs.width if drafter else 1
    if config.width is None and drafter and own > 1:
        reasons["width"] = f"{drafter.name} ranks siblings; control decides how many pay"
    return config.width or own
