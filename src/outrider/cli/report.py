"""`outrider report`: how near its device's limit a model runs, plain and speculative; the limit from the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from outrider.cli.drafters import settings_for
from outrider.cli.options import Json, MaxTokens, Model, PromptFiles, Settings, takes
from outrider.cli.render import notes, print_json, write
from outrider.cli.session import fetch_if_missing
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.measure.prompts import load_prompts
from outrider.measure.survey import by_task
from outrider.registry import unknown

DRAFTERS = "eagle3,small_model,ngram"
"""A head, a model of its own, and one that needs nothing."""


@takes(EngineConfig)
def report(
    model: Model,
    *,
    settings: Settings,
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Where report.json, report.md and report.html go.")],
    prompts: PromptFiles = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="At most this many prompts of each task.")
    ] = None,
    law: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help='May be repeated: "T=0", "T=1", "T=1, top-p, penalties"; all if left out.'),
    ] = None,
    together: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Prompts at once; may be repeated; 1 if left out.")
    ] = None,
    max_tokens: MaxTokens = 128,
    context: Annotated[int, typer.Option(metavar="N", min=1, help="Known tokens before a measured pass.")] = 1024,
    tau: Annotated[
        float,
        typer.Option(metavar="X", min=0, help="Mean of runs with synthetic acceptance (output not valid); 0: none."),
    ] = 4.0,
    levels: Annotated[int, typer.Option(metavar="N", min=1, help="Levels of those runs' trees.")] = 5,
    siblings: Annotated[int, typer.Option(metavar="N", min=1, help="Most children of a node of those trees.")] = 1,
    peers: Annotated[bool, typer.Option(help="Also run Transformers, and vLLM where it is installed.")] = True,
    vllm: Annotated[
        str, typer.Option(metavar="JSON", help="More keywords for vLLM's LLM, such as its attention_backend.")
    ] = "{}",
    starts: Annotated[bool, typer.Option(help="Also start afresh twice, with nothing compiled and again.")] = True,
    random_weights: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help='May be repeated: "window", "long", "experts", or "all"; none if left out.'),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help='Beside plain decoding; may be repeated: "passes" of all widths, "speculative" decoding, "shapes" of '
            'cycles in flight, "synthetic" acceptance, "twin", "random", "starts", "peers"; all if left out.',
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure on one device, in one run: the read limit, passes by rows and requests, drafts, and all else in a cycle.

    What the bars ask for comes first, and report.json is written after every row. `--drafter` takes several, joined by
    commas. With `--widen 8b` the model is a widened twin: a real model's behaviour at an 8B's price.
    """
    from outrider.cli import reports
    from outrider.measure.gpu_report import PARTS, Reporter, Scope
    from outrider.measure.random_rows import MODELS, chosen
    from outrider.measure.report_page import markdown, sections
    from outrider.measure.report_rows import LAWS, PLAIN
    from outrider.measure.start import Start, measure_starts

    names = [name.strip() for name in settings.engine.get("drafter", DRAFTERS).split(",")]
    asked = [prompt for task in by_task(load_prompts(prompts), limit).values() for prompt in task]
    _check(model, settings.engine, names)
    kinds = unknown("kind of model", random_weights or (), [*MODELS, "all"])
    problem = unknown("law", law or (), list(LAWS)) or kinds or unknown("part", only or (), list(PARTS))
    if problem:
        raise ConfigError(problem)
    options = _keywords(vllm)
    folder, title = reports.room(out), f"{model}: a report"
    fetch_if_missing(model)
    from outrider import LLM

    def open_llm(own: Mapping[str, Any]) -> Any:
        return LLM(model, **_settings(settings.engine, own))

    def start() -> list[Start]:
        own = _settings(settings.engine, {"drafter": PLAIN})
        return measure_starts(model, own, asked[0].content, status.update) if starts else []

    told = notes()

    def save(found: Mapping[str, Any]) -> None:
        reports.save(folder, "report", title, found, sections(found, plots=False), is_whole=False)
        last = found["elapsed"][-1]
        told.print(f"{last['seconds']:7.1f} s  {last['part']}", highlight=False, markup=False)

    with told.status("measuring") as status:
        scope = Scope(
            drafters=names,
            prompts=[prompt.content for prompt in asked],
            laws=law or tuple(LAWS),
            together=together or (1,),
            max_tokens=max_tokens,
            context=context,
            tau=tau or None,
            depth=levels,
            width=siblings,
            peers=peers,
            vllm=options,
            random=chosen(random_weights or ()),
            only=only or PARTS,
        )
        found = Reporter(open_llm, scope, start, status.update, save).run()
    reports.save(folder, "report", title, found, sections(found))
    if as_json:
        print_json(found)
    else:
        write(markdown(found))


def _check(model: str, engine: Mapping[str, Any], names: Sequence[str]) -> None:
    fixed = [name for name in ("adaptive", "prefix_cache") if name in engine]
    if fixed:
        raise ConfigError(f"{fixed[0]} cannot be set for a report, which sets it itself: leave it out")
    for name in names:
        EngineConfig.of(model=model, **_settings(engine, {"drafter": name}))


def _keywords(vllm: str) -> dict[str, Any]:
    try:
        return dict(json.loads(vllm))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vllm={vllm!r} is no JSON object: give one such as {{}}") from error


def _settings(engine: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The user's settings under a run's own, less those that its drafter does not read."""
    return {**settings_for(own["drafter"], engine), **own}
