"""`outrider check`: proves on your prompts that speculation changes nothing but the speed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from outrider.cli.drafters import every, settings_for
from outrider.cli.options import Json, Limit, MaxTokens, Model, PromptFile, Raw, Settings, takes
from outrider.cli.render import notes, number, print_json, table, write
from outrider.cli.session import fetch_if_missing
from outrider.config import EngineConfig
from outrider.errors import ConfigError, RequestError
from outrider.measure.lossless import Comparison, Report
from outrider.measure.lossless import check as compare
from outrider.measure.prompts import load_prompts
from outrider.request import SamplingParams


@takes(EngineConfig)
def check(
    model: Model,
    *,
    settings: Settings,
    prompts: PromptFile = None,
    limit: Limit = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(metavar="X", help="A temperature to compare at; may be repeated. Default: 0 and 1."),
    ] = None,
    max_tokens: MaxTokens = 128,
    seed: Annotated[int, typer.Option(metavar="N", help="Prompt i runs with this seed plus i.")] = 0,
    batched: Annotated[
        bool, typer.Option("--batched", help="Leave the runs alone out: no speed is measured, much sooner done.")
    ] = False,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Run prompts plain and speculatively, alone and in a batch, and compare all tokens; exit 1 on a difference.

    `--drafter all` takes every drafter in turn, and a cascade; of those that must be trained, the ones trained for
    this model.
    """
    temperatures = temperature or [0.0, 1.0]
    acceptance = settings.engine.get("acceptance", "match")
    if acceptance != "match" and any(temperatures):
        raise ConfigError(f"acceptance={acceptance!r} promises no same text but the same law: check at --temperature 0")
    for value in temperatures:
        SamplingParams(temperature=value, max_tokens=max_tokens, seed=seed)  # refused now, not after loading
    asked = load_prompts(prompts, limit)
    wanted = settings.engine.get("drafter", "auto")
    engines = {wanted: settings.engine}
    if wanted == "all":
        engines = {name: settings_for(name, settings.engine) for name in every(model, settings.engine)}
    for engine in engines.values():
        EngineConfig.of(model=model, **engine)
    fetch_if_missing(model)

    def open_llm(drafter: str) -> Any:
        from outrider import LLM

        llm = LLM(model, **(engines.get(drafter) or settings_for(drafter, settings.engine)))
        llm.engine.strict = True  # the text would go on without a drafter that does wrong, and nothing be checked
        return llm

    console = notes()
    with console.status("loading") as status:
        report = compare(
            open_llm,
            list(engines),
            asked,
            temperatures=temperatures,
            max_tokens=max_tokens,
            seed=seed,
            raw=raw,
            batched=batched,
            progress=lambda done, total: status.update(f"run {done} of {total}"),
        )
    if not report.compared:
        raise RequestError(f"no prompt could be run: {report.comparisons[0].refusals[0]}")
    _show(report, console, as_json)
    if report.differing:
        raise typer.Exit(1)


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
