"""Drafters: what is accepted, task by task, at fixed shapes; and the rows in which that, and speed, is told."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from outrider.errors import ConfigError, OutriderError
from outrider.measure.bench import PLAIN, Figures
from outrider.measure.prompts import Prompt
from outrider.record import Tally
from outrider.result import Result

BATCH = 32
"""Prompts that are answered together where only acceptance is measured: a text does not depend on its neighbours."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree's outline: most levels, siblings a level, nodes in all; width 1 is a chain."""

    depth: int
    width: int
    nodes: int

    @property
    def name(self) -> str:
        return f"chain {self.depth}" if self.width == 1 else f"tree {self.depth}x{self.width}, {self.nodes} nodes"


@dataclass(frozen=True, slots=True)
class Variant:
    """What one row of the table stands for; `shape` is None where control decides, `together` how many are asked at
    once."""

    drafter: str
    temperature: float
    acceptance: str = "match"
    shape: Shape | None = None
    together: int = 1

    def settings(self) -> dict[str, Any]:
        """Keywords of `EngineConfig`."""
        settings: dict[str, Any] = {"drafter": self.drafter, "acceptance": self.acceptance, "prefix_cache": False}
        return settings if self.shape is None else {**settings, **asdict(self.shape), "adaptive": False}


@dataclass(slots=True)
class Row:
    """One variant's figures; `error` tells why a drafter could not be measured (no trained weights, say).

    Attributes:
        tallies: pooled counters by task. speeds: by task, this variant's runs and plain decoding's, prompt by prompt.
        pass_bytes: that a pass of plain decoding reads, where that is known.
    """

    variant: Variant
    tallies: dict[str, Tally] = field(default_factory=dict)
    speeds: dict[str, tuple[Figures, Figures]] = field(default_factory=dict)
    error: str | None = None
    pass_bytes: int | None = None

    def tau(self, tasks: Iterable[str]) -> float | None:
        """Mean over tasks of each task's pooled tau, as Spec-Bench reports; None where one has no cycle."""
        values = [self.tallies[task].tau for task in tasks if task in self.tallies]
        return statistics.fmean(v for v in values if v is not None) if values and None not in values else None

    def pooled(self) -> Tally:
        tally = Tally()
        for part in self.tallies.values():
            tally.add(part)
        return tally

    def by_position(self) -> list[float]:
        """The chance that a cycle accepts its i-th guess, given that it accepted the one before."""
        tally = self.pooled()
        before = [tally.cycles, *tally.accepted_by_position]
        return [a / b for a, b in zip(tally.accepted_by_position, before, strict=False) if b]

    def overall(self) -> tuple[Figures, Figures]:
        """This variant's runs and plain decoding's, of all tasks."""
        mine, plain = Figures(), Figures()
        for one, other in self.speeds.values():
            mine.add(one)
            plain.add(other)
        return mine, plain

    def draft_share(self) -> float | None:
        """Share of the decoding cycles' time that went into drafting."""
        tally = self.pooled()
        seconds = tally.seconds_draft + tally.seconds_verify + tally.seconds_sample
        return tally.seconds_draft / seconds if seconds else None

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.variant),
            "error": self.error,
            "tau": {task: tally.tau for task, tally in self.tallies.items()},
            "acceptance_by_position": self.by_position(),
            "cycles": self.pooled().cycles,
            "drafted": self.pooled().drafted,
            "draft_share": self.draft_share(),
            "speed": {task: mine.to_json(plain) for task, (mine, plain) in self.speeds.items()},
            **self._overall(),
        }

    def _overall(self) -> dict[str, Any]:
        if not self.speeds:
            return {}
        mine, plain = self.overall()
        sides = {"overall": mine.to_json(plain), PLAIN: plain.to_json(plain)}
        return {
            **sides,
            "plain_by_task": {task: other.rate for task, (_, other) in self.speeds.items()},
            "pass_bytes": self.pass_bytes,
        }


class Open(Protocol):
    """Opens an `LLM` with these keywords of `EngineConfig`."""

    def __call__(self, settings: Mapping[str, Any]) -> Any: ...


Progress = Callable[[str], None]


def by_task(prompts: Sequence[Prompt], limit: int | None) -> dict[str, list[Prompt]]:
    """The first `limit` prompts of each task, tasks in the order of the prompts."""
    tasks: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kept = tasks.setdefault(prompt.task, [])
        if limit is None or len(kept) < limit:
            kept.append(prompt)
    return tasks


def measure_acceptance(
    open_llm: Open,
    variants: Sequence[Variant],
    tasks: Mapping[str, Sequence[Prompt]],
    params: Any,
    raw: bool = False,
    progress: Progress = lambda text: None,
    keep: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Tau and acceptance by position of every variant, at its fixed shape; seconds are those of batches.

    params: `SamplingParams` whose temperature is set a variant. keep: is given every row that is whole.

    Raises:
        ConfigError: if a prompt failed; a drafter that cannot be built is told of in its row instead.
    """
    rows = [Row(variant) for variant in variants]
    for count, row, llm in _opened(open_llm, rows):
        asked = replace(params, temperature=row.variant.temperature)
        progress(f"acceptance {count} of {len(variants)}: {row.variant.drafter}")
        for task, prompts in tasks.items():
            row.tallies[task] = _accepted(llm, prompts, asked, raw)
        keep(row)
    return rows


def _opened(open_llm: Open, rows: Sequence[Row]) -> Iterator[tuple[int, Row, Any]]:
    """Each row with its number, from 1, and its engine, open until the next is asked for.

    A drafter that cannot be built is told of in its row instead.
    """
    for count, row in enumerate(rows, start=1):
        try:
            llm = open_llm(row.variant.settings())
        except OutriderError as error:
            row.error = str(error)
            continue
        with closing(llm):
            yield count, row, llm


def answers(llm: Any, prompts: Sequence[Prompt], params: Any, raw: bool = False) -> Iterator[Result]:
    """One result a prompt, in their order, `BATCH` prompts at a time.

    Raises:
        ConfigError: if a prompt failed.
    """
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        for prompt, result in zip(part, llm.generate([p.content for p in part], params, raw=raw), strict=True):
            if result.error is not None:
                raise ConfigError(f"{prompt.name} failed: {result.error}")
            yield result


def _accepted(llm: Any, prompts: Sequence[Prompt], params: Any, raw: bool) -> Tally:
    tally = Tally()
    for result in answers(llm, prompts, params, raw):
        tally.add(result.tally)
    return tally
