"""`outrider load`: latencies and throughput of any OpenAI-compatible server, under clients or arrivals."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.cli.options import Json, Limit, MaxTokens, PromptFiles, read_key
from outrider.cli.render import number, print_json, table
from outrider.errors import ConfigError

COLUMNS = ("load", "tokens/s", "requests/s", "good/s", "failed", "first token", "token", "between", "tau")


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
    temperature: Annotated[float, typer.Option(metavar="X", help="0 is greedy.")] = 0.0,
    body: Annotated[
        str | None, typer.Option(metavar="JSON", help="More fields of every request, as '{\"speculation\": ...}'.")
    ] = None,
    plain_too: Annotated[
        bool, typer.Option("--plain-too", help="Each load again with speculation off, right behind it.")
    ] = False,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name there; else its first.")] = None,
    api_key_file: Annotated[str | None, typer.Option(metavar="FILE", help="Its first line is the key.")] = None,
    good_first_token: Annotated[float, typer.Option(metavar="X", help="Seconds that a good answer's may take.")] = 2.0,
    good_token: Annotated[float, typer.Option(metavar="X", help="Mean seconds of its other tokens.")] = 0.2,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the arrivals.")] = 0,
    as_json: Json = False,
) -> None:
    """Ask a server under several loads, and tell what its clients saw: seconds at P50, P95 and P99.

    `between` is the time from one piece of text to the next, in which a burst of tokens is one piece; `token` is a
    request's mean over its tokens. A request is good if it keeps `--good-first-token` and `--good-token`.
    """
    from outrider.measure.load import PLAIN, Client, Goal, Level, messages_of, outcome
    from outrider.measure.prompts import load_prompts

    if any(not each > 0 for each in rate or ()):
        raise ConfigError("rate is out of range: give requests a second above 0")
    levels = [Level(clients=n) for n in clients or ([] if rate else [1, 4, 16, 64])] + [
        Level(rate=r) for r in rate or []
    ]
    asked = [messages_of(prompt) for prompt in load_prompts(prompts, limit)]
    fields = {"max_tokens": max_tokens, "temperature": temperature, **_object(body)}
    ways = {"": fields, ", plain": fields | PLAIN} if plain_too else {"": fields}
    goal = Goal(first_token=good_first_token, token=good_token)
    found = []
    for level, (way, given) in itertools.product(levels, ways.items()):
        client = Client(url, model, read_key(api_key_file), given)
        samples, seconds = asyncio.run(client.run(level, asked, max(requests, level.clients or 0), seed))
        found.append(outcome(f"{level}{way}", samples, seconds, goal))
    if as_json:
        print_json({"url": url, "body": fields, "prompts": len(asked), "loads": [each.to_json() for each in found]})
        return
    Console(highlight=False).print(table("seconds at P50 / P95 / P99", COLUMNS, [_row(each) for each in found]))


def _row(found: Any) -> list[str]:
    return [
        found.level,
        *(number(value) for value in (found.tokens_per_second, found.requests_per_second, found.goodput)),
        str(found.failed),
        *(" / ".join(number(v, 3) for v in each.values()) for each in (found.first_token, found.token, found.between)),
        number(found.tau),
    ]


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--body is no JSON ({error}): mend it") from error
    if not isinstance(found, dict):
        raise ConfigError("--body is no JSON object: give fields in braces")
    return found
