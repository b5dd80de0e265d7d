"""The check of an engine here: its texts with each drafter beside those without one, and their speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from outrider.cli.drafters import every, settings_for
from outrider.cli.render import notes, number, print_json, table, write
from outrider.cli.session import fetch_if_missing
from outrider.config import EngineConfig
from outrider.errors import ConfigError, RequestError
from outrider.measure.lossless import Comparison, Report
from outrider.measure.lossless import check as compare
from outrider.measure.prompts import Prompt
from outrider.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What is compared, and how; `engine`: keywords of `EngineConfig`."""

    model: str
    engine: dict[str, Any]
    temperatures: list[float]
    max_tokens: int
    seed: int
    batched: bool
    raw: bool

    def check(self, prompts: Callable[[], list[Prompt]], as_json: bool) -> None:
        """Compare, show what was found, and exit 1 on a difference.

        Raises:
            ConfigError, RequestError: nothing can be compared.
        """
        asked, engines = self._refused_early(prompts), self._engines()
        fetch_if_missing(self.model)

        def open_llm(drafter: str) -> Any:
            from outrider import LLM

            llm = LLM(self.model, **(engines.get(drafter) or settings_for(drafter, self.engine)))
            llm.engine.strict = True  # the text would go on without a drafter that does wrong, and nothing be checked
            return llm

        console = notes()
        with console.status("loading") as status:
            report = compare(
                open_llm,
                list(engines),
                asked,
                temperatures=self.temperatures,
                max_tokens=self.max_tokens,
                seed=self.seed,
                raw=self.raw,
                batched=self.batched,
                progress=lambda done, total: status.update(f"run {done} of {total}"),
            )
        if not report.compared:
            raise RequestError(f"no prompt could be run: {report.comparisons[0].refusals[0]}")
        _show(report, console, as_json)
        if report.differing:
            raise typer.Exit(1)

    def _refused_early(self, prompts: Callable[[], list[Prompt]]) -> list[Prompt]:
        """The prompts; what cannot be honoured is refused now, not after loading."""
        acceptance = self.engine.get("acceptance", "match")
        if acceptance != "match" and any(self.temperatures):
            raise ConfigError(
                f"acceptance={acceptance!r} promises no same text but the same law: check at --temperature 0"
            )
        for value in self.temperatures:
            SamplingParams(temperature=value, max_tokens=self.max_tokens, seed=self.seed)
        return prompts()

    def _engines(self) -> dict[str, dict[str, Any]]:
        """Settings by drafter."""
        wanted = self.engine.get("drafter", "auto")
        engines = {wanted: self.engine}
        if wanted == "all":
            engines = {name: settings_for(name, self.engine) for name in every(self.model, self.engine)}
        for engine in engines.values():
            EngineConfig.of(model=self.model, **engine)
        return engines


def _show(report: Report, console: Any, as_json: bool) -> None:
    columns = (
        "drafter",
        "temperature",
        "compared",
        "differing",
        "guesses",
        "in batch",
        "tau",
        "plain tok/s",
        "tok/s",
        "ratio",
    )
    console.print(table("speculative against plain", columns, [_row(c) for c in report.comparisons]))
    if any(not c.tally.drafted for c in report.comparisons):
        console.print("where guessing does not pay, control leaves it off alone; the batched runs guess in every cycle")
    if as_json:
        print_json(report.to_json())
        return
    for comparison in report.comparisons:
        for d in comparison.differences[:1]:
            write(
                f"{d.prompt}, {d.drafter}, temperature {d.temperature}, {d.mode}: position {d.position} is {d.other}, "
                f"plain says {d.plain} (top-2 margin {number(d.margin, 6)})\n"
            )
    write(f"compared {report.compared}, differing {report.differing}\n")


def _row(c: Comparison) -> list[str]:
    figures = (number(c.tally.tau), number(c.plain_rate, 1), number(c.rate, 1), number(c.ratio))
    return [
        c.drafter,
        str(c.temperature),
        str(c.compared),
        str(c.differing),
        str(c.tally.drafted),
        str(c.batch_tally.drafted),
        *figures,
    ]
