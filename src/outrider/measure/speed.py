"""How fast control, or a fixed depth, makes drafters: all that are compared take turns, load by load, task by task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.errors import CapacityError, OutriderError
from outrider.measure.bench import PLAIN, Figures, bench, blocks_of
from outrider.measure.contenders import Contender, fixed, ours
from outrider.measure.prompts import Prompt
from outrider.measure.survey import Open, Progress, Row, Variant

MOST_WARM_UPS = 4
"""Whole answers before the first that counts, while graphs are still taken."""
Speeds = dict[str, tuple[Figures, Figures]]
"""By task, somebody's runs and plain decoding's."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How speed is measured.

    Attributes:
        repeats: of each prompt. raw: no chat template. weigh: bytes that a pass of so many rows reads, behind so many
            known tokens each. peers: others that answer the first variant's prompts in turns with it, by name, made
            from the plain engine. at_once: the engines of all drafters are open at once and take turns, else one
            drafter's after the other, as memory may hold no more beside the plain one.
    """

    repeats: int = 1
    raw: bool = False
    weigh: Callable[[Any, int, int], int] | None = None
    peers: Mapping[str, Callable[[Any], Contender]] = field(default_factory=dict)
    at_once: bool = False


def measure_speed(
    open_llm: Open,
    variants: Sequence[Variant],
    tasks: Mapping[str, Sequence[Prompt]],
    params: Any,
    pace: Pace = Pace(),
    progress: Progress = lambda text: None,
    describe: Callable[[str, Any], None] = lambda drafter, llm: None,
) -> list[Row]:
    """All variants of one temperature and load in turns with plain decoding, prompt by prompt; one engine a drafter.

    A shape is a chain or tree that every cycle fills; without one control decides. A prompt that failed is told of in
    the figures of its runs, a drafter that cannot be built in the errors of its rows. describe: is given every engine.
    """
    rows = [Row(variant) for variant in variants]
    others: list[Row] = []
    with closing(open_llm({"drafter": "none", "prefix_cache": False})) as plain:
        describe(PLAIN, plain)
        peers = {name: make(plain) for name, make in pace.peers.items()}
        drafters = list(dict.fromkeys(variant.drafter for variant in variants))
        for company in [drafters] if pace.at_once else [[drafter] for drafter in drafters]:
            with ExitStack() as stack:
                mine = [row for row in rows if row.variant.drafter in company]
                opened = list(_opened(open_llm, plain, mine, describe, stack))
                for cell in _cells(opened):
                    progress(f"speed {1 + rows.index(cell[0][0])} of {len(rows)}: {cell[0][0].variant.drafter}")
                    found = _raced(plain, cell, tasks, params, pace, peers)
                    heat = cell[0][0].variant.temperature
                    others += [Row(Variant(name, heat), speeds=speeds) for name, speeds in found.items()]
                    peers = {}
    return [*rows, *others]


def _opened(
    open_llm: Open, plain: Any, rows: Sequence[Row], describe: Callable[[str, Any], None], stack: ExitStack
) -> Iterator[tuple[Row, Any]]:
    """Each row with its engine, one a drafter, open as long as the stack is; "auto" is told by its name."""
    import torch

    engines: dict[str, Any] = {}
    for row in rows:
        drafter = row.variant.drafter
        if drafter not in engines:
            try:
                llm = stack.enter_context(closing(open_llm(Variant(drafter, 0.0).settings() | _rule(row))))
                engines[drafter] = _narrower(llm, plain) or llm
            except torch.OutOfMemoryError:
                engines[drafter] = CapacityError("the device has no memory left for it beside the others: name fewer")
            except OutriderError as error:
                engines[drafter] = error
            if not isinstance(engines[drafter], OutriderError):
                describe(_name(drafter, engines[drafter]), engines[drafter])
        llm = engines[drafter]
        if isinstance(llm, OutriderError):
            row.error = str(llm)
            continue
        row.variant = replace(row.variant, drafter=_name(drafter, llm))
        yield row, llm


def _rule(row: Row) -> dict[str, str]:
    return {"acceptance": row.variant.acceptance}


def _name(drafter: str, llm: Any) -> str:
    return llm.resolved.drafter if drafter == "auto" else drafter


def _cells(opened: Sequence[tuple[Row, Any]]) -> list[list[tuple[Row, Any]]]:
    """Rows of one temperature and one load."""
    cells: dict[tuple[float, int], list[tuple[Row, Any]]] = {}
    for row, llm in opened:
        cells.setdefault((row.variant.temperature, row.variant.together), []).append((row, llm))
    return list(cells.values())


def _take_graphs(contender: Contender, llm: Any, prompts: Sequence[Prompt], max_tokens: int) -> None:
    """Where cycles fly: answer whole prompts until no graph is taken any more, which would be timed later."""
    pipeline = llm.engine.pipeline
    for _ in range(MOST_WARM_UPS if pipeline is not None else 0):
        captured = pipeline.num_captured
        contender(prompts, max_tokens)
        if pipeline.num_captured == captured:
            return


def _narrower(llm: Any, plain: Any) -> OutriderError | None:
    """Why an engine is no match for the plain one: memory left it narrower passes, or no graphs."""
    mine, others = llm.resolved.memory, plain.resolved.memory
    if mine.max_rows < others.max_rows or (others.graphs and not mine.graphs):
        return CapacityError(
            f"memory beside the others leaves it passes of {mine.max_rows} rows and {mine.graphs >> 20} MiB of graphs, "
            f"where plain decoding has {others.max_rows} and {others.graphs >> 20}: name fewer, or lower num_slots"
        )
    return None


def _raced(
    plain: Any,
    cell: Sequence[tuple[Row, Any]],
    tasks: Mapping[str, Sequence[Prompt]],
    params: Any,
    pace: Pace,
    peers: Mapping[str, Contender],
) -> dict[str, Speeds]:
    """Fill the rows of a cell; returns the peers' runs by name, beside the plain ones of the same turns."""
    variant = cell[0][0].variant
    asked = replace(params, temperature=variant.temperature)
    contenders = {PLAIN: ours(plain, asked, pace.raw), **peers}
    keys = [str(number) for number in range(len(cell))]
    for key, (row, llm) in zip(keys, cell, strict=True):
        shape, contender = row.variant.shape, ours(llm, asked, pace.raw)
        contenders[key] = contender if shape is None else fixed(llm, contender, shape.depth, shape.width)
    first = next(blocks_of(next(iter(tasks.values())), variant.together))
    for name, llm in zip((PLAIN, *keys), (plain, *(llm for _, llm in cell)), strict=True):
        _take_graphs(contenders[name], llm, first, params.max_tokens)
    found: dict[str, Speeds] = {name: {} for name in peers}
    for number, (task, prompts) in enumerate(tasks.items()):
        given = prompts, params.max_tokens, pace.repeats, variant.together
        figures = bench(contenders, *given, warm=not number, first=number)
        for key, (row, _) in zip(keys, cell, strict=True):
            row.speeds[task] = figures[key], figures[PLAIN]
            row.tallies[task] = figures[key].pooled()
        for name, speeds in found.items():
            speeds[task] = figures[name], figures[PLAIN]
    if pace.weigh is not None:
        for row, _ in cell:
            row.pass_bytes = pace.weigh(plain, variant.together, row.overall()[1].context)
    return found
