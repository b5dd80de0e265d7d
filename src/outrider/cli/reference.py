"""Writes docs/cli.md from the program itself; `make docs` runs it, a test compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import typer

from outrider.cli.app import app

HEAD = """# Command line

Written by `make docs` from the program's own help; edit the docstrings, not this page.

Standard output carries the answer; progress, tables and remarks go to standard error, at a terminal only. With `--json`
the last line of standard output is exactly one JSON object, `{"error": sentence}` after a refusal.

| exit code | meaning |
|---|---|
| 0 | done; `check`, `demo`: all texts are the same; `check --endpoint`: nothing is broken |
| 1 | `check`, `demo`: a text differs; `check --endpoint`: something is broken; `bench`, `load`: no answer |
| 2 | refused: a wrong option, setting, model or prompt; standard error says how to mend it, in one sentence |
| 130 | interrupted (Ctrl-C) |
"""


def reference() -> str:
    """The whole page, as Markdown."""
    group: Any = typer.main.get_command(app)
    shared: dict[str, list[str]] = {}
    lines = [line for name, verb in group.commands.items() for line in _verb(name, verb, shared)]
    for panel, rows in shared.items():
        lines += [f"## {panel} options", "", *rows, ""]
    return "\n".join([HEAD, *lines])


def _verb(name: str, verb: Any, shared: dict[str, list[str]]) -> Iterator[str]:
    """One verb's section; options that several verbs have in common are put aside into `shared`, by panel."""
    arguments = [p for p in verb.params if p.param_type_name == "argument"]
    options = [p for p in verb.params if p.param_type_name == "option"]
    usage = " ".join([f"outrider {name}", *(p.metavar for p in arguments), "[OPTIONS]"])
    yield from (f"## `{usage}`", "", verb.help, "")
    yield from (f"- `{p.metavar.strip('[]')}`: {p.help}" for p in arguments)
    yield ""
    for panel, members in groupby(options, key=lambda p: p.rich_help_panel):
        rows = ["| option | |", "|---|---|", *(f"| {_spelling(p)} | {_help(p)} |" for p in members)]
        if panel is None:
            yield from (*rows, "")
        else:
            shared[panel] = rows
            yield from (f"And the [{panel.lower()} options](#{panel.lower()}-options).", "")


def _spelling(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar}"
    return ", ".join(f"`{name}{value}`" for name in [*option.opts, *option.secondary_opts])


def _help(option: Any) -> str:
    default = f" Default: {option.default}." if option.show_default and option.default else ""
    return (option.help + default).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
