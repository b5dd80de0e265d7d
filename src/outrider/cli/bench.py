"""`outrider bench`: how fast with speculation, against plain decoding and against Transformers, on your prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.options import Json, MaxTokens, Model, PromptFiles, Raw, Settings, takes
from outrider.cli.render import notes, number, print_json, table, write
from outrider.cli.session import session
from outrider.cli.survey import Survey
from outrider.cli.survey import run as run_survey
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.measure.bench import PLAIN, Figures, ours, transformers_generate
from outrider.measure.bench import bench as take_turns
from outrider.measure.prompts import load_prompts
from outrider.registry import READ_BY, nearest
from outrider.request import SamplingParams

FLOATS = ("float32", "bfloat16", "float16")
"""Types in which Transformers can run."""
PARTS = ("acceptance", "speed")


@takes(EngineConfig)
def bench(
    model: Model,
    *,
    settings: Settings,
    prompts: PromptFiles = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="At most this many prompts; of several drafters: of each task.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(metavar="X", help="0 is greedy (the default); of several drafters repeatable.")
    ] = None,
    max_tokens: MaxTokens = 128,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="How often each prompt is run.")] = 1,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE", help="Also run Transformers' greedy generate in this dtype; may be repeated."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="PART", help="Of several drafters: acceptance or speed alone.")
    ] = None,
    processes: Annotated[
        int, typer.Option(metavar="N", min=1, help="Of several drafters: acceptance by so many processes at once.")
    ] = 1,
    rows: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Of several drafters: a new file that gets each row of acceptance once measured."
        ),
    ] = None,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Time prompts plain and speculatively, in turns, alone on the machine; ratios are medians over prompts.

    `--drafter all`, or several joined by commas, gives one table by task: tau and acceptance by position as a chain and
    as a tree under both rules, or the one that `--acceptance` names (in batches, at a fixed shape), then the speed that
    control makes of each.
    """
    temperatures = temperature or [0.0]
    wanted = settings.engine.get("drafter", "auto")
    if wanted == "all" or "," in wanted:
        if only not in (None, *PARTS):
            raise ConfigError(f"only={only!r} is unknown: {nearest(str(only), list(PARTS))}")
        if against or repeats > 1:
            raise ConfigError("against and repeats are for one drafter: leave them out, or name one")
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit} is out of range: give a whole number of at least 1")
        asked = load_prompts(prompts)
        parts = PARTS if only is None else (only,)
        run_survey(
            Survey(model, settings.engine, asked, limit, temperatures, max_tokens, parts, raw, processes, rows), as_json
        )
        return
    if only is not None or rows is not None or len(temperatures) > 1:
        raise ConfigError("only, rows and a second temperature are for several drafters: give --drafter all, or a,b")
    asked = load_prompts(prompts, limit)
    plain_settings = {name: value for name, value in settings.engine.items() if name not in READ_BY}
    plain_settings |= {"drafter": "none", "prefix_cache": False}
    console = notes()
    for dtype in against or []:
        if dtype not in FLOATS:
            raise ConfigError(f"against={dtype!r} is unknown: {nearest(dtype, list(FLOATS))}")
    params = SamplingParams(temperature=temperatures[0], max_tokens=max_tokens, seed=0)
    EngineConfig.of(model=model, **settings.engine)  # refused now, not after the plain engine was loaded
    with (
        session(model, plain_settings) as plain,
        session(model, {**settings.engine, "prefix_cache": False}) as llm,
        console.status("measuring") as status,
    ):
        contenders = {PLAIN: ours(plain, params, raw), llm.resolved.drafter: ours(llm, params, raw)}
        for dtype in against or []:
            contenders[f"transformers {dtype}"] = transformers_generate(plain, dtype, raw)
        figures = take_turns(
            contenders, asked, max_tokens, repeats, lambda done, total: status.update(f"prompt {done} of {total}")
        )
        resolved = llm.describe()
    report = {name: runs.to_json(figures[PLAIN]) for name, runs in figures.items()}
    columns = ("", "tok/s", "ratio to plain", "least", "tau")
    console.print(table("median ratios over prompts", columns, [_row(name, row) for name, row in report.items()]))
    if as_json:
        print_json({"figures": report, "resolved": resolved})
    else:
        write("; ".join(f"{name} {_line(name, figures)}" for name in figures) + "\n")


def _row(name: str, row: dict[str, Any]) -> list[str]:
    return [
        name,
        number(row["tokens_per_second"], 1),
        *(number(row[k]) for k in ("ratio_to_plain", "least_ratio", "tau")),
    ]


def _line(name: str, figures: dict[str, Figures]) -> str:
    rate = f"{figures[name].rate:.1f} tokens/s"
    return rate if name == PLAIN else f"{rate} ({figures[name].ratio(figures[PLAIN]):.2f}x)"
