"""What `outrider bench` measures: drafters by task, temperature, concurrency, depth, tree and rule; as one report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import Any

from outrider.cli.drafters import named, settings_for
from outrider.cli.render import notes, print_json, write
from outrider.cli.session import fetch_if_missing
from outrider.config import ACCEPTANCE, EngineConfig
from outrider.errors import ConfigError
from outrider.measure.ceiling import Sureness, sureness
from outrider.measure.contenders import Contender
from outrider.measure.prompts import Prompt
from outrider.measure.speed import Pace, measure_speed
from outrider.measure.survey import Row, Shape, Variant, by_task, measure_acceptance
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

    rows: a file that is given each row of acceptance as soon as it is there, a line of JSON each. several: drafters,
    which are measured in ways of their own; one alone keeps the user's settings. together: prompts at once. depths: of
    chains that every cycle fills. rivals: drafters of such chains beside the one that is measured; "none" is a second
    plain engine. repeats, peers: as of `Pace`.
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
    several: bool = True
    together: Sequence[int] = (1,)
    depths: Sequence[int] = ()
    rivals: Sequence[str] = ()
    repeats: int = 1
    peers: Mapping[str, Callable[[Any], Contender]] = field(default_factory=dict)

    def asked(self) -> dict[str, Any]:
        """How it was asked for, for the report."""
        return {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "repeats": self.repeats,
            "raw": self.raw,
            "engine": dict(self.engine),
        }

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, seed=0)

    @property
    def tasks(self) -> dict[str, list[Prompt]]:
        return by_task(self.prompts, self.limit)

    def drafters(self) -> list[str]:
        return named(self.model, self.engine, CASCADES) if self.several else [self.engine.get("drafter", "auto")]

    def paces(self) -> list[Variant]:
        """What speed is measured of, at every temperature and concurrency: control's own choice, chains, and rivals."""
        rule = self.engine.get("acceptance", ACCEPTANCE[0])
        shapes = [Shape(depth, 1, depth) for depth in self.depths]
        found = [
            Variant(name, temperature, rule, shape, together)
            for drafter in self.drafters()
            for temperature in self.temperatures
            for together in self.together
            for name, shape in (
                (drafter, None),
                *((drafter, shape) for shape in shapes),
                *((rival, shape) for rival in self.rivals for shape in (shapes if rival != "none" else [None])),
            )
        ]
        return list(dict.fromkeys(found))

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
        own = ("depth", "width", "nodes") if self.several else ()
        shapeless = {k: v for k, v in self.engine.items() if k not in own}
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


def run(survey: Survey, as_json: bool, out: Path | None = None) -> bool:
    """Measure, then print Markdown on stdout, or one JSON object; into a folder, too. Returns whether a prompt failed.

    Raises:
        ConfigError: for settings that no engine takes, or where nothing could be measured.
    """
    from outrider.cli.reports import origin, save
    from outrider.measure.bench_page import sections
    from outrider.measure.bench_report import Engines, report
    from outrider.measure.page import markdown

    if survey.several and "adaptive" in survey.engine:
        raise ConfigError("adaptive cannot be set for several drafters, which are measured in fixed ways: leave it out")
    if survey.several and survey.engine.get("depth") == 0:
        raise ConfigError("depth=0 guesses nothing that could be measured: give at least 1")
    for variant in (*survey.variants(), *survey.paces()):
        EngineConfig.of(model=survey.model, **survey.settings(variant.settings()))
        SamplingParams(temperature=variant.temperature, max_tokens=survey.max_tokens)
    if survey.rows:
        _make_room(survey.rows, survey.parts)
    fetch_if_missing(survey.model)

    accepted: list[Row] = []
    ceilings: dict[float, dict[str, Sureness]] = {}
    fast: list[Row] = []
    engines = Engines()
    with notes().status("measuring") as status:
        if "acceptance" in survey.parts:
            accepted, ceilings = _accepted(survey, status.update)
        if "speed" in survey.parts:
            pace = Pace(survey.repeats, survey.raw, engines.weigh, survey.peers, at_once=not survey.several)
            fast = measure_speed(
                survey.open, survey.paces(), survey.tasks, survey.params, pace, status.update, engines.take
            )
    if all(row.error for row in (*accepted, *fast)):
        raise ConfigError(f"nothing could be measured: {(accepted or fast)[0].error}")
    found = report({**origin(), **survey.asked()}, survey.tasks, accepted, ceilings, fast, engines)
    shown = sections(found)
    if out is not None:
        save(out, "bench", f"{survey.model}: speculation", found, shown)
    if as_json:
        print_json(found)
    else:
        write(markdown(shown))
    return bool(found["failures"])


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
