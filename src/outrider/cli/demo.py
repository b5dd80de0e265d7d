"""`outrider demo`: one prompt, plain and then speculative, and whether the two texts are the same."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.cli.generate import raise_failed
from outrider.cli.options import Json
from outrider.cli.render import GUESSED, number, print_json, table, write_delta
from outrider.cli.session import session
from outrider.config import EngineConfig
from outrider.measure.prompts import EDIT
from outrider.registry import DRAFTERS
from outrider.request import SamplingParams

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Run:
    """One streamed answer and the seconds it took by the clock."""

    result: Any
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second, the reading of the prompt included."""
        return self.result.completion_tokens / self.seconds


def demo(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Alias, folder, .gguf file or hub id; an alias is fetched first.")
    ] = MODEL,
    drafter: Annotated[str, typer.Option(metavar="NAME", help=f"Who guesses: auto, {', '.join(DRAFTERS)}.")] = "auto",
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="What is asked; an editing task if left out.", show_default=False)
    ] = EDIT,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Completion tokens.")] = 192,
    as_json: Json = False,
) -> None:
    """Fetch a small model, answer one prompt plain and then speculatively, and compare; exit 1 if the texts differ."""
    console = Console(highlight=False, quiet=as_json)
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    EngineConfig.of(model=model, drafter=drafter)  # refused now, not after the plain run
    runs = {}
    for name in ("none", drafter):
        with session(model, {"drafter": name}) as llm:
            for _ in llm.stream("Hello", SamplingParams(max_tokens=8)):  # the first pass of all pays for warming up
                pass
            heading = "plain" if name == "none" else f"speculative (accepted guesses in {GUESSED})"
            console.rule(heading, align="left")
            runs[name] = _run(llm, prompt, params, console)
    plain, speculative = runs["none"], runs[drafter]
    identical = plain.result.token_ids == speculative.result.token_ids
    ratio, tau = speculative.rate / plain.rate, speculative.result.tally.tau
    rows = [
        ("plain", number(plain.rate, 1), "1.00", "1.00"),
        (speculative.result.drafter, number(speculative.rate, 1), number(ratio), number(tau)),
    ]
    console.print(table(f"{model}, {plain.result.completion_tokens} tokens", ("", "tokens/s", "ratio", "tau"), rows))
    console.print(f"identical: {'yes' if identical else 'no'}")
    if as_json:
        rates = {"plain_tokens_per_second": plain.rate, "tokens_per_second": speculative.rate}
        print_json(
            {
                "model": model,
                "drafter": speculative.result.drafter,
                "identical": identical,
                "ratio": ratio,
                "tau": tau,
                **rates,
            }
        )
    if not identical:
        raise typer.Exit(1)


def _run(llm: Any, prompt: str, params: SamplingParams, console: Console) -> Run:
    started = time.perf_counter()
    result = None
    for delta in llm.stream(prompt, params):
        write_delta(console, delta, llm.tokenizer.decode)
        result = delta.result or result
    seconds = time.perf_counter() - started
    console.print("\n")
    raise_failed(result)
    return Run(result, seconds)
