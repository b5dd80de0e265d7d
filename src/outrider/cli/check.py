"""`outrider check`: proves on your prompts that speculation changes nothing but the speed, here or at any server."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.check_local import Local
from outrider.cli.options import Json, Limit, PromptFile, Raw, Settings, read_key, takes
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.measure.endpoint.plan import DRAWS, MAX_TOKENS, Plan
from outrider.measure.prompts import load_prompts


@takes(EngineConfig)
def check(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Alias, folder, .gguf file or hub id; of an endpoint, its name there."),
    ] = None,
    *,
    settings: Settings,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Check this OpenAI-compatible server instead of an engine here.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A trusted server of the same model, to hold the endpoint against."),
    ] = None,
    reference_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name at the reference; else its first.")
    ] = None,
    prompts: PromptFile = None,
    limit: Limit = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(metavar="X", help="A temperature to compare at; may be repeated. Default: 0 and 1."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Completion tokens a prompt. Default: 128; of an endpoint 64.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Prompt i runs with this seed plus i.")] = 0,
    draws: Annotated[
        int, typer.Option(metavar="N", min=40, help="Texts that an endpoint draws for each sampling field.")
    ] = DRAWS,
    tie: Annotated[
        float,
        typer.Option(metavar="X", min=0, help="Greedy texts of an endpoint may part at margins up to this, in nats."),
    ] = 0.0,
    at_once: Annotated[int, typer.Option(metavar="N", min=1, help="Requests in flight at an endpoint.")] = 8,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Its first line is the endpoint's key.")
    ] = None,
    reference_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Its first line is the reference's key.")
    ] = None,
    batched: Annotated[
        bool, typer.Option("--batched", help="Leave the runs alone out: no speed is measured, much sooner done.")
    ] = False,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Run prompts plain and speculatively, alone and in a batch, and compare all tokens; exit 1 on a difference.

    `--drafter all` takes every drafter in turn, and a cascade; of those that must be trained, the ones trained for
    this model.

    `--endpoint URL` puts any OpenAI-compatible server to the test, alone or beside a `--reference`: greedy texts, every
    sampling field's law, stop strings, usage, log-probabilities, streams. It exits 1 where something is broken.
    """
    if endpoint is not None:
        if settings.engine or batched or temperature:
            raise ConfigError("--endpoint takes no engine options, no --batched and no --temperature: leave them out")
        from outrider.cli.check_remote import Remote

        Remote(
            url=endpoint,
            reference=reference,
            models=(model, reference_model),
            keys=(read_key(api_key_file), read_key(reference_key_file)),
            raw=raw,
            at_once=at_once,
            plan=Plan(draws=draws, max_tokens=MAX_TOKENS if max_tokens is None else max_tokens, tie=tie, seed=seed),
        ).check(load_prompts(prompts, limit), as_json)
        return
    if model is None or reference is not None:
        raise ConfigError("give a MODEL to check here, or --endpoint URL (with --reference URL beside it)")
    local = Local(
        model=model,
        engine=settings.engine,
        temperatures=temperature or [0.0, 1.0],
        max_tokens=128 if max_tokens is None else max_tokens,
        seed=seed,
        batched=batched,
        raw=raw,
    )
    local.check(lambda: load_prompts(prompts, limit), as_json)
