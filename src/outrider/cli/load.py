"""`outrider load`: latencies and throughput of any OpenAI-compatible server, under clients or arrivals."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.cli.options import Json, Limit, MaxTokens, PromptFiles, read_key
from outrider.cli.render import number, print_json, table
from outrider.errors import ConfigError

COLUMNS = ("load", "tokens/s", "requests/s", "good/s", "failed", "first token", "token", "between", "tau", "ratio")


def load(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the server, such as http://127.0.0.1:8000.")],
    *,
    prompts: PromptFiles = None,
    limit: Limit = None,
    clients: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, help="Clients at once; may be repeated. Default: 1, 4, 16, 64."),
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(metavar="X", help="Requests a second, at random times; may be repeated.")
    ] = None,
    requests: Annotated[int, typer.Option(metavar="N", min=1, help="Of each load, or one a client.")] = 32,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(metavar="X", help="0 is greedy (the default); may be repeated.")
    ] = None,
    body: Annotated[
        str | None, typer.Option(metavar="JSON", help="More fields of every request, as '{\"speculation\": ...}'.")
    ] = None,
    plain_too: Annotated[
        bool, typer.Option("--plain-too", help="Each load also with speculation off, in turns.")
    ] = False,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="How often each load is run.")] = 1,
    timeout: Annotated[
        float, typer.Option(metavar="X", help="Seconds that one answer may take; then it has failed.")
    ] = 600.0,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name there; else its first.")] = None,
    api_key_file: Annotated[str | None, typer.Option(metavar="FILE", help="Its first line is the key.")] = None,
    good_first_token: Annotated[float, typer.Option(metavar="X", help="Seconds that a good answer's may take.")] = 2.0,
    good_token: Annotated[float, typer.Option(metavar="X", help="Mean seconds of its other tokens.")] = 0.2,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the arrivals.")] = 0,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Also write load.json, load.md and load.html there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a server under several loads, and tell what its clients saw: seconds at P50, P95 and P99.

    `between` is the time from one piece of text to the next, in which a burst of tokens is one piece; `token` is a
    request's mean over its tokens. A request is good if it keeps `--good-first-token` and `--good-token`. With
    `--plain-too` the ratio is the median over prompts of an answer's speed by the plain one's, with bootstrap bounds.
    What fails is counted and in no figure; where a load had no answer at all the exit code is 1.
    """
    from outrider.cli.reports import origin, room, save
    from outrider.measure.load import PLAIN, Client, messages_of
    from outrider.measure.load_page import sections
    from outrider.measure.outcomes import Goal, Level
    from outrider.measure.prompts import load_prompts

    _check(rate or (), timeout)
    levels = [Level(clients=n) for n in clients or ([] if rate else [1, 4, 16, 64])]
    levels += [Level(rate=r) for r in rate or []]
    prompted = load_prompts(prompts, limit)
    temperatures = temperature or [0.0]
    fields = {"max_tokens": max_tokens, **_object(body)}
    goal, folder = Goal(first_token=good_first_token, token=good_token), room(out) if out else None
    key, tasks = read_key(api_key_file), [prompt.task for prompt in prompted]

    def client(heat: float, is_plain: bool) -> Client:
        return Client(url, model, key, {"temperature": heat, **fields, **(PLAIN if is_plain else {})}, timeout)

    found = []
    for level, heat in itertools.product(levels, temperatures):
        name = f"{level}, T = {heat:g}" if len(temperatures) > 1 else str(level)
        ways = {is_plain: client(heat, is_plain) for is_plain in ((False, True) if plain_too else (False,))}
        asked = [messages_of(prompt) for prompt in prompted]
        seen = asyncio.run(_observe(level, heat, ways, asked, max(requests, level.clients or 0), seed, repeats))
        plain = seen.get(True)
        found.append(seen[False].outcome(name, goal, tasks, plain))
        if plain is not None:
            found.append(plain.outcome(f"{name}, plain", goal, tasks))
    server, memory = asyncio.run(_server(client(temperatures[0], False)))
    report = {
        **origin(),
        "url": url,
        "server": server,
        "memory": memory,
        "body": fields,
        "temperatures": temperatures,
        "prompts": len(prompted),
        "tasks": tasks,
        "repeats": repeats,
        "goal": asdict(goal),
        "loads": [each.to_json() for each in found],
    }
    if folder is not None:
        save(folder, "load", f"Load on {url}", report, sections(report))
    if as_json:
        print_json(report)
    else:
        Console(highlight=False).print(table("seconds at P50 / P95 / P99", COLUMNS, [_row(each) for each in found]))
    if any(each.failed == each.requests for each in found):
        raise typer.Exit(1)


def _check(rates: Sequence[float], timeout: float) -> None:
    if any(not each > 0 for each in rates):
        raise ConfigError("rate is out of range: give requests a second above 0")
    if not timeout > 0:
        raise ConfigError(f"timeout={timeout:g} is out of range: give seconds above 0")


async def _observe(
    level: Any,
    temperature: float,
    ways: Mapping[bool, Any],
    asked: Sequence[Any],
    count: int,
    seed: int,
    repeats: int,
) -> dict[bool, Any]:
    """A level in each way, in turns; who begins changes from one repeat to the next."""
    from outrider.measure.outcomes import Observed

    seen = {is_plain: Observed(level, temperature, is_plain) for is_plain in ways}
    for turn in range(repeats):
        for is_plain in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            client = ways[is_plain]
            before = (await client.figures()).get("pass_seconds_total", {})
            samples, seconds = await client.run(level, asked, count, seed + turn, turn * count)
            after = (await client.figures()).get("pass_seconds_total", {})
            spent = {part: value - before.get(part, 0.0) for part, value in after.items()}
            seen[is_plain].add(samples, seconds, spent)
    return seen


async def _server(client: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """The model's card, as far as our own server has one, and its memory in bytes."""
    return await client.card(), (await client.figures()).get("memory_bytes", {})


def _row(found: Any) -> list[str]:
    ratio = found.ratio
    bounds = "" if ratio is None or ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return [
        found.level,
        *(number(value) for value in (found.tokens_per_second, found.requests_per_second, found.goodput)),
        str(found.failed),
        *(" / ".join(number(v, 3) for v in each.values()) for each in (found.first_token, found.token, found.between)),
        number(found.tau),
        "-" if ratio is None else f"{ratio['ratio']:.2f}{bounds}",
    ]


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--body is no JSON ({error}): mend it") from error
    if not isinstance(found, dict):
        raise ConfigError("--body is no JSON object: give fields in braces")
    return found
