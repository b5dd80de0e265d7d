"""`outrider advise`: which drafter to run on your prompts, if any, and what to tell other engines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from outrider.cli.drafters import named, settings_for
from outrider.cli.options import Json, Limit, MaxTokens, PromptFiles, Raw, Settings, takes
from outrider.cli.render import notes, number, print_json, table, write
from outrider.cli.session import fetch_if_missing
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.registry import CASCADES, ELSEWHERE, NEED_WEIGHTS

COLUMNS = ("load", "drafter", "ratio", "95 %", "blocks", "tau", "stopped, as")
OFF = "leave it off"
SHAPING = ("drafter_model", "depth", "width", "nodes", "exit_layers", "dtype", "device", "threads")
"""Settings of the races that what is advised has to repeat."""
FEW = 5
"""Prompts under which an interval tells of the clock more than of texts."""
LEARNED = frozenset({*NEED_WEIGHTS, *CASCADES})
"""Candidates that are trained, where they can run at all."""
DEPTH = 4
"""Guesses a cycle for engines that want a number."""


@takes(EngineConfig)
def advise(
    *,
    settings: Settings,
    target: Annotated[str, typer.Option(metavar="MODEL", help="Alias, folder, .gguf file or hub id.")],
    prompts: PromptFiles = None,
    limit: Limit = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Requests at once; may be repeated. Default: 1.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(metavar="X", help="0 is greedy (the default); may be repeated.")
    ] = None,
    max_tokens: MaxTokens = 128,
    budget: Annotated[float, typer.Option(metavar="X", min=1, help="Seconds for all races together.")] = 300.0,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Race drafters against plain decoding on your prompts, and say what to run; "leave it off" is an answer.

    `--drafter` names candidates, joined by commas; all that can guess for the target otherwise. Losers stop early.
    Ratios have intervals over prompts; a drafter is advised where it surely brings 2 % or more.
    """
    from outrider.measure.advice import Load, race_all
    from outrider.measure.prompts import load_prompts

    engine = settings.engine
    if engine.get("depth") == 0:
        raise ConfigError("depth=0 guesses nothing that could be raced: give at least 1, or leave it out")
    # Pairs first, as time may run out: what "auto" takes is one of them where there is any.
    drafters = sorted(named(target, engine), key=lambda name: "+" not in name)
    loads = [Load(many, heat) for heat in temperature or [0.0] for many in sorted(set(concurrency or [1]))]
    asked = load_prompts(prompts, limit)
    for drafter in ("none", *drafters):
        EngineConfig.of(model=target, **settings_for(drafter, engine))
    fetch_if_missing(target)

    def open_llm(settings: Mapping[str, Any]) -> Any:
        from outrider import LLM

        return LLM(target, **{**settings_for(settings["drafter"], engine), **settings})

    console = notes()
    with console.status("loading") as status:
        advice = race_all(
            open_llm,
            drafters,
            asked,
            loads,
            max_tokens=max_tokens,
            budget=budget,
            raw=raw,
            progress=status.update,
        )
    if not advice.races:
        raise ConfigError(f"no candidate could be run: {next(iter(advice.errors.values()))}")
    console.print(table("against plain decoding", COLUMNS, [_row(race) for race in advice.races]))
    flags = _flags(target, advice.overall(), engine)
    if as_json:
        print_json(_json(advice, flags))
    else:
        write("".join(f"{line}\n" for line in _lines(advice, flags, len(asked))))


def _row(race: Any) -> list[str]:
    found = race.interval()
    bounds = "-" if found is None else f"{found.low:.2f} to {found.high:.2f}"
    ratio = number(found and found.ratio)
    return [str(race.load), race.drafter, ratio, bounds, str(len(race.logs)), number(race.tally.tau), race.why]


def _flags(target: str, drafter: str | None, engine: dict[str, Any]) -> dict[str, str]:
    """What to run here, in vLLM and in SGLang."""
    from outrider.measure.advice import elsewhere
    from outrider.models.heads import files

    if drafter is None:
        return {"outrider": shlex.join(["outrider", "serve", target, "--drafter", "none"]), "vllm": OFF, "sglang": OFF}
    weights = engine.get("drafter_model")
    shaping = {name: engine[name] for name in SHAPING if name in engine}
    own = {"drafter": drafter, **settings_for(drafter, shaping)}
    words = [word for name, value in own.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    ours = shlex.join(["outrider", "serve", target, *words])
    known = ELSEWHERE.get(drafter)
    takes_weights = known is not None and bool(settings_for(drafter, {"drafter_model": weights}).get("drafter_model"))
    if takes_weights and weights is not None and files.trained(weights) is not None:
        known = None  # made here, of a vocabulary of its own
    vllm, sglang = elsewhere(known, engine.get("depth") or DEPTH, weights if takes_weights else None)
    return {"outrider": ours, "vllm": vllm, "sglang": sglang}


def _json(advice: Any, flags: dict[str, str]) -> dict[str, Any]:
    return {
        "run": advice.overall(),
        "decided": advice.is_decided,
        "undecided": advice.undecided,
        "flags": flags,
        "loads": [
            {
                "concurrency": load.concurrency,
                "temperature": load.temperature,
                "run": winner.drafter if (winner := advice.winner(load)) else None,
                "ties": [race.drafter for race in advice.ties(load)],
            }
            for load in advice.loads
        ],
        "races": [race.to_json() for race in advice.races],
        "errors": advice.errors,
    }


def _lines(advice: Any, flags: dict[str, str], num_prompts: int) -> Iterator[str]:
    for load in advice.loads:
        winner, ranked = advice.winner(load), advice.under(load)
        if winner is not None:
            found, ties = winner.interval(), ", ".join(race.drafter for race in advice.ties(load))
            yield (
                f"{load}: {winner.drafter}, {found.ratio:.2f}x plain decoding ({found.low:.2f} to {found.high:.2f})"
                + (f"; as good, perhaps: {ties}" if ties else "")
            )
        elif ranked:
            found = ranked[0].interval()
            best = f"{ranked[0].drafter}, the best, is at {found.ratio:.2f}x ({found.low:.2f} to {found.high:.2f})"
            yield f"{load}: {OFF if advice.is_decided else 'none surely pays so far'}; {best}"
        else:
            yield f"{load}: not decided within the time"
        for limit in ranked[0].limits() if ranked else ():
            yield f"  {limit}"
    if not advice.is_decided:
        yield f"Not decided within the time: {', '.join(advice.undecided)}; raise --budget, or name fewer by --drafter"
    if advice.overall() is None and not advice.is_decided:
        yield "Run: nothing is advised yet"
        return
    yield f"Run: {flags['outrider']}"
    if advice.overall() is not None:
        yield f"vLLM: {flags['vllm']}"
        yield f"SGLang: {flags['sglang']}"
    if LEARNED.isdisjoint(name for race in advice.races for name in (race.drafter, *race.drafter.split("+"))):
        yield "What would change it: a drafter trained on this target's replies (`outrider train`, see README)."
    if num_prompts < FEW:
        yield f"Raced on {num_prompts} of your prompts only: others may go otherwise, give {FEW} or more."
    for drafter, error in advice.errors.items():
        yield f"{drafter} could not run: {error}"
