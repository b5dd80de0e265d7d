"""What a person sees: one JSON line on stdout, streamed text, and tables and progress on stderr at a terminal only."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

GUESSED = "green"
"""The colour of tokens that were guessed and accepted."""


def notes() -> Console:
    """Where tables, progress and remarks go: stderr, and nowhere when that is not a terminal."""
    return Console(stderr=True, quiet=not sys.stderr.isatty(), highlight=False)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object as one line, in ASCII so that no terminal can spoil it; JSON has no NaN, so that raises."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
    sys.stdout.flush()


def write(text: str) -> None:
    """Show a piece of streamed text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_delta(console: Console, delta: Any, decode: Callable[[Sequence[int]], str]) -> None:
    """Show one piece of a stream, its accepted guesses coloured; they come first, the target's own token last."""
    guessed = decode(delta.token_ids[: delta.num_accepted]) if delta.num_accepted else ""
    # Where a character straddles the border, or a stop string cut the text, the pieces do not add up: colour it all.
    split = len(guessed) if delta.text.startswith(guessed) else len(delta.text)
    console.print(Text.assemble((delta.text[:split], GUESSED), delta.text[split:]), end="", soft_wrap=True)


def speed_line(result: Any) -> str:
    """One line on how a result came about."""
    tally, rate = result.tally, result.tokens_per_second
    parts = [f"{result.completion_tokens} tokens", result.finish_reason]
    if rate:
        parts.insert(1, f"{rate:.1f} tokens/s")
    if tally.tau:
        parts.append(f"{result.drafter}: tau {tally.tau:.2f}, {tally.accepted} of {tally.drafted} guesses accepted")
    if result.cached_tokens:
        parts.append(f"{result.cached_tokens} prompt tokens from the cache")
    return " · ".join([*parts, f"seed {result.seed}"])


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table with its first column to the left and numbers to the right."""
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        made.add_row(*row)
    return made


def number(value: float | None, digits: int = 2) -> str:
    """A figure with a fixed number of decimals, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


@contextmanager
def progress_bar(description: str) -> Iterator[Any]:
    """A bar for every stage on stderr; yields `update(stage, done, total)`, in any unit; total None: not known yet."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes(), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(f"{description}: {stage}", total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield update
