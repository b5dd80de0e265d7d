"""`outrider bench --drafter all`: one table of drafters by task, temperature, tree and rule, in Markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import Any

from outrider.cli.drafters import named, settings_for
from outrider.cli.render import notes, number, print_json, write
from outrider.cli.session import fetch_if_missing
from outrider.config import ACCEPTANCE, EngineConfig
from outrider.errors import ConfigError
from outrider.measure.bench import PLAIN
from outrider.measure.ceiling import GUESSES, Sureness, sureness
from outrider.measure.prompts import Prompt
from outrider.measure.survey import Row, Shape, Variant, by_task, measure_acceptance, measure_speed
from outrider.request import SamplingParams

CHAIN_DEPTH = 8
TREE_DEPTH = 12
"""A tree's nodes go where the weights are, so where a text is sure it may run on."""
TREE_WIDTH = 4
TREE_NODES = 32
CASCADES = ("ngram+eagle3", "ngram+block", "suffix+eagle3", "suffix+block")
"""Pairs that `all` measures besides every drafter alone."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What is measured: `parts` names "acceptance", "speed" or both; acceptance by so many processes at once.

    rows: a file that is given each row of acceptance as soon as it is there, a line of JSON each.
    """

    model: str
    engine: Mapping[str, Any]
    prompts: Sequence[Prompt]
    limit: int | None
    temperatures: Sequence[float]
    max_tokens: int
    parts: Sequence[str]
    raw: bool = False
    processes: int = 1
    rows: Path | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, seed=0)

    @property
    def tasks(self) -> dict[str, list[Prompt]]:
        return by_task(self.prompts, self.limit)

    def drafters(self) -> list[str]:
        return named(self.model, self.engine, CASCADES)

    def shapes(self) -> list[Shape]:
        deepest, width = self.engine.get("depth"), self.engine.get("width") or TREE_WIDTH
        chain = deepest or CHAIN_DEPTH
        tree = Shape(deepest or TREE_DEPTH, width, self.engine.get("nodes") or TREE_NODES)
        return [Shape(chain, 1, chain), tree] if width > 1 else [Shape(chain, 1, chain)]

    def variants(self) -> list[Variant]:
        """Fixed shapes; at temperature 0 the two rules are the same."""
        rules = (self.engine["acceptance"],) if "acceptance" in self.engine else ACCEPTANCE
        return [
            Variant(drafter, temperature, rule, shape)
            for temperature in self.temperatures
            for rule in (rules if temperature else ACCEPTANCE[:1])
            for shape in self.shapes()
            for drafter in self.drafters()
        ]

    def settings(self, of: Mapping[str, Any]) -> dict[str, Any]:
        """The user's settings under a variant's own, less those that its drafter does not read."""
        shapeless = {k: v for k, v in self.engine.items() if k not in ("depth", "width", "nodes")}
        return {**settings_for(of["drafter"], shapeless), **of}

    def open(self, settings: Mapping[str, Any]) -> Any:
        from outrider import LLM

        return LLM(self.model, **self.settings(settings))

    def accepted(
        self, variants: Sequence[Variant], progress: Callable[[str], None], keep: Callable[[Row], None]
    ) -> list[Row]:
        return measure_acceptance(self.open, variants, self.tasks, self.params, self.raw, progress, keep)

    def keep(self, row: Row) -> None:
        """Add a finished row to the file of rows."""
        if self.rows:
            with self.rows.open("a") as file:
                file.write(json.dumps(row.to_json()) + "\n")

    def ceiling(self, temperature: float) -> dict[str, Sureness]:
        """By task, for the deepest shape."""
        asked = replace(self.params, temperature=temperature)
        with closing(self.open({"drafter": "none", "prefix_cache": False})) as llm:
            return sureness(llm, self.tasks, asked, max(shape.depth for shape in self.shapes()), self.raw)


def run(survey: Survey, as_json: bool) -> None:
    """Measure, then print Markdown on stdout, or one JSON object.

    Raises:
        ConfigError: for settings that no engine takes.
    """
    if "adaptive" in survey.engine:
        raise ConfigError("adaptive cannot be set for several drafters, which are measured in fixed ways: leave it out")
    if survey.engine.get("depth") == 0:
        raise ConfigError("depth=0 guesses nothing that could be measured: give at least 1")
    for variant in survey.variants():
        EngineConfig.of(model=survey.model, **survey.settings(variant.settings()))
    if survey.rows:
        _make_room(survey.rows, survey.parts)
    fetch_if_missing(survey.model)

    accepted: list[Row] = []
    ceilings: dict[float, dict[str, Sureness]] = {}
    fast: list[Row] = []
    with notes().status("measuring") as status:
        if "acceptance" in survey.parts:
            accepted, ceilings = _accepted(survey, status.update)
        if "speed" in survey.parts:
            own = [Variant(drafter, t) for t in survey.temperatures for drafter in survey.drafters()]
            fast = measure_speed(survey.open, own, survey.tasks, survey.params, survey.raw, status.update)
    if all(row.error for row in (*accepted, *fast)):
        raise ConfigError(f"nothing could be measured: {(accepted or fast)[0].error}")
    tasks = survey.tasks
    if as_json:
        rows = {"acceptance": [row.to_json() for row in accepted], "speed": [row.to_json() for row in fast]}
        bounds = {f"{t:g}": {task: asdict(found) for task, found in by.items()} for t, by in ceilings.items()}
        print_json({"tasks": {task: len(prompts) for task, prompts in tasks.items()}, **rows, "ceiling": bounds})
        return
    counts = ", ".join(f"{task} {len(prompts)}" for task, prompts in tasks.items())
    write(f"Prompts: {counts}; at most {survey.max_tokens} tokens each; tau counts the target's own token.\n")
    if accepted:
        write("\n" + _acceptance_table(accepted, list(tasks)))
        write("\nWith the law known and the draw not, a drafter would reach at most (at T = 0: were the text drawn):\n")
        write("\n" + _ceiling_table(ceilings, list(tasks)))
    if fast:
        write("\n" + _speed_table(fast, list(tasks)))


def _make_room(rows: Path, parts: Sequence[str]) -> None:
    """See that rows will come, and can be written where nothing else is."""
    if "acceptance" not in parts:
        raise ConfigError("rows are of acceptance, which is not measured: leave --rows or --only speed out")
    try:
        if rows.is_file() and rows.stat().st_size:
            raise ConfigError(f"{rows} holds something already: move it away, or name a new file for the rows")
        rows.write_text("")
    except OSError as error:
        raise ConfigError(f"{rows} cannot be written ({error.strerror or error}): give another") from error


def _accepted(survey: Survey, progress: Callable[[str], None]) -> tuple[list[Row], dict[float, dict[str, Sureness]]]:
    """Every variant's row and every temperature's ceiling, here or by processes that share the cores."""
    variants = survey.variants()
    if survey.processes == 1:
        ceilings = {t: survey.ceiling(t) for t in survey.temperatures}
        return survey.accepted(variants, progress, survey.keep), ceilings
    threads = max(1, (cpu_count() or 1) // survey.processes)
    with ProcessPoolExecutor(survey.processes, get_context("spawn"), _share_cores, (threads,)) as pool:
        # Trees of many nodes take longest, so they begin.
        longest = sorted(variants, key=lambda v: -v.shape.nodes if v.shape else 0)
        rows = {pool.submit(_accepted_alone, survey, variant): variant for variant in longest}
        bounds = {t: pool.submit(survey.ceiling, t) for t in survey.temperatures}
        for done, future in enumerate(as_completed(rows), start=1):
            survey.keep(future.result())
            progress(f"acceptance {done} of {len(variants)}")
        found = {variant: future.result() for future, variant in rows.items()}
        return [found[variant] for variant in variants], {t: future.result() for t, future in bounds.items()}


def _share_cores(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _accepted_alone(survey: Survey, variant: Variant) -> Row:
    (row,) = survey.accepted([variant], lambda text: None, lambda row: None)
    return row


def _acceptance_table(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    head = ("T", "rule", "tree", "drafter", "mean tau", *tasks, "accepted at 1, 2, ...", "drafted a cycle")
    lines = []
    for row in rows:
        variant = row.variant
        name = "" if variant.shape is None else variant.shape.name
        first = (f"{variant.temperature:g}", variant.acceptance, name, variant.drafter)
        if row.error:
            lines.append((*first, row.error, *[""] * (len(head) - 5)))
            continue
        tally = row.pooled()
        lines.append(
            (
                *first,
                number(row.tau(tasks)),
                *(number(row.tallies[task].tau) for task in tasks),
                " ".join(f"{rate:.2f}" for rate in row.by_position()),
                number(tally.drafted / tally.cycles if tally.cycles else None, 1),
            )
        )
    return _markdown(head, lines)


def _ceiling_table(ceilings: Mapping[float, Mapping[str, Sureness]], tasks: Sequence[str]) -> str:
    """A cell: tau with so many guesses at every level; the last row of a temperature: positions in doubt."""
    head = ("T", "guesses a level", "mean tau", *tasks)
    lines = []
    for temperature, found in ceilings.items():
        for k in GUESSES:
            taus = [found[task].tau[k] for task in tasks]
            lines.append((f"{temperature:g}", str(k), number(sum(taus) / len(taus)), *map(number, taus)))
        doubts = [f"{found[task].doubtful:.0%}" for task in tasks]
        lines.append((f"{temperature:g}", "positions whose likeliest token has < 1/2", "", *doubts))
    return _markdown(head, lines)


def _speed_table(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """A cell: tokens a second, and the median over prompts of the ratio to plain decoding."""
    head = ("T", "drafter", "mean ratio", "tau", "drafting", *tasks)
    lines = []
    for row in rows:
        first = (f"{row.variant.temperature:g}", row.variant.drafter)
        if row.error:
            lines.append((*first, row.error, *[""] * (len(head) - 3)))
            continue
        cells = {task: (mine.rate, mine.ratio(plain)) for task, (mine, plain) in row.speeds.items()}
        share = row.draft_share()
        mean = sum(ratio for _, ratio in cells.values()) / len(cells)
        lines.append(
            (
                *first,
                number(mean),
                number(row.tau(tasks)),
                "-" if share is None else f"{share:.0%}",
                *(f"{rate:.0f} ({ratio:.2f}x)" for rate, ratio in cells.values()),
            )
        )
    plain = {task: figures[1].rate for row in rows if not row.error for task, figures in row.speeds.items()}
    lines.append(("", PLAIN, "1.00", "1.00", "", *(f"{plain[task]:.0f}" for task in tasks)))
    return _markdown(head, lines)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """A task's name or an error may hold what would end the cell."""
    return " ".join(text.replace("|", "\\|").split())
