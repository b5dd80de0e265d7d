"""`outrider bench`: how fast with speculation, against plain decoding and against Transformers, on your prompts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Json, MaxTokens, Model, PromptFiles, Raw, Settings, takes
from outrider.cli.survey import Survey
from outrider.cli.survey import run as run_survey
from outrider.config import EngineConfig
from outrider.control.depth import DEEPEST
from outrider.errors import ConfigError
from outrider.measure.contenders import transformers_generate
from outrider.measure.prompts import load_prompts
from outrider.registry import nearest

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
        list[float] | None, typer.Option(metavar="X", help="0 is greedy (the default); may be repeated.")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, help="Prompts answered at once; may be repeated. Default: 1."),
    ] = None,
    fixed_depth: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=1,
            max=DEEPEST,
            help="Also chains of exactly N guesses in every cycle, in the same turns, beside what theory predicts of "
            "one prompt at once; may be repeated.",
        ),
    ] = None,
    rival: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Of one drafter: also this one's chains of --fixed-depth, in the same turns; `none` is plain decoding "
            "by a second engine, which shows what noise does; may be repeated.",
        ),
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
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Also write bench.json, bench.md and bench.html there.")
    ] = None,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Time prompts plain and speculatively, in turns, alone on the machine; ratios are medians over prompts.

    By task, temperature and concurrency, with bootstrap intervals: tokens a second, tau, acceptance by position,
    latencies, where the time goes, the share of the read limit, memory. A prompt that fails is told of, counts in no
    figure, and makes the exit code 1.

    `--drafter all`, or several joined by commas, also gives tau and acceptance by position as a chain and as a tree
    under both rules, or the one that `--acceptance` names (in batches, at a fixed shape).
    """
    from outrider.cli.reports import room

    wanted = settings.engine.get("drafter", "auto")
    several = wanted == "all" or "," in wanted
    if several:
        if only not in (None, *PARTS):
            raise ConfigError(f"only={only!r} is unknown: {nearest(str(only), list(PARTS))}")
        if against or repeats > 1:
            raise ConfigError("against and repeats are for one drafter: leave them out, or name one")
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit} is out of range: give a whole number of at least 1")
        if rival:
            raise ConfigError("rival is for one drafter: leave it out, or name one")
    elif only is not None or rows is not None:
        raise ConfigError("only and rows are for several drafters: give --drafter all, or a,b")
    temperatures, together = temperature or [0.0], concurrency or [1]
    for dtype in against or []:
        if dtype not in FLOATS:
            raise ConfigError(f"against={dtype!r} is unknown: {nearest(dtype, list(FLOATS))}")
        if temperatures[0] or together[0] > 1:
            raise ConfigError("against is greedy and alone: give temperature 0 and concurrency 1 first")
    deepest = settings.engine.get("depth")
    if deepest is not None and any(depth > deepest for depth in fixed_depth or []):
        raise ConfigError(f"fixed_depth={max(fixed_depth or [])} is more than depth={deepest}: raise depth or leave it")
    if not fixed_depth and any(name != "none" for name in rival or []):
        raise ConfigError("a rival has a fixed depth: give --fixed-depth, or --rival none for a second plain engine")
    survey = Survey(
        model,
        settings.engine,
        load_prompts(prompts) if several else load_prompts(prompts, limit),
        limit if several else None,
        temperatures,
        max_tokens,
        PARTS if several and only is None else (only or "speed",),
        raw,
        processes,
        rows,
        several=several,
        together=together,
        depths=fixed_depth or (),
        rivals=tuple(dict.fromkeys(rival or [])),
        repeats=repeats,
        peers={
            f"transformers {dtype}": partial(transformers_generate, dtype=dtype, raw=raw) for dtype in against or []
        },
    )
    if run_survey(survey, as_json, room(out) if out else None):
        raise typer.Exit(1)
