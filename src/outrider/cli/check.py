"""`outrider check`: proves on your prompts that speculation changes nothing but the speed, here or at any server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from outrider.cli.check_local import Local
from outrider.cli.options import Json, Limit, PromptFile, Raw, Settings, read_key, takes
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.measure.endpoint.plan import DRAWS, Plan
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
        int | None, typer.Option(metavar="N", help=f"Texts that an endpoint draws for each field. Default: {DRAWS}.")
    ] = None,
    tie: Annotated[
        float | None,
        typer.Option(metavar="X", help="Greedy texts of an endpoint may part at margins up to this, in nats."),
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Requests in flight at an endpoint. Default: 8.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="X", help="Seconds that an endpoint's answer may take. Default: 120.")
    ] = None,
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
    of_reference = {"reference_model": reference_model, "reference_key_file": reference_key_file}
    of_endpoint = {"reference": reference, **of_reference, "api_key_file": api_key_file, "draws": draws, "tie": tie}
    of_endpoint |= {"at_once": at_once, "timeout": timeout}
    if endpoint is not None:
        if settings.engine or batched or temperature:
            raise ConfigError("--endpoint takes no engine options, no --batched and no --temperature: leave them out")
        if reference is None:
            _refuse_given(of_reference, "--reference URL")
        from outrider.cli.check_remote import Remote

        plan: dict[str, Any] = {"draws": draws, "max_tokens": max_tokens, "tie": tie, "seed": seed}
        Remote(
            url=endpoint,
            reference=reference,
            models=(model, reference_model),
            keys=(read_key(api_key_file), read_key(reference_key_file, "reference_key_file")),
            raw=raw,
            at_once=8 if at_once is None else at_once,
            timeout=120.0 if timeout is None else timeout,
            plan=Plan(**{name: value for name, value in plan.items() if value is not None}),
        ).check(load_prompts(prompts, limit), as_json)
        return
    _refuse_given(of_endpoint, "--endpoint URL")
    if model is None:
        raise ConfigError("give a MODEL to check here, or --endpoint URL")
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


def _refuse_given(options: Mapping[str, Any], owner: str) -> None:
    """Options that would have no effect, as what they go with was not given."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} goes with {owner}: give that too, or leave it out")
