"""The command line: one thin file per verb (parse, configure, call, render); errors become one sentence here."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from outrider.errors import OutriderError

EXIT_DIFFERENT = 1
"""`check` and `demo`: the texts differ, or a server that was checked is broken."""
EXIT_REFUSED = 2
"""A mistake that a person can mend; stderr says how."""
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; `arguments` defaults to the process's own.

    A refusal is one sentence on stderr; with `--json`, stdout also ends in `{"error": sentence}`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    _prepare_streams()
    if os.environ.get("RANK", "0") != "0" and any(word.startswith("--tensor-parallel") for word in words):
        _fall_silent()
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        # What is left to be written would raise once more, when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader left (`| head`)
            return EXIT_BROKEN_PIPE
        return _refuse(f"the system refused ({error}): make room or give access, and try again", words)


def _run(words: list[str]) -> int:
    import typer

    # Their bars and notices would mix with ours; a person's own setting wins.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from outrider.cli.app import app

    # Typer exports no name for the base of "no such option", "missing argument" and the like.
    usage_error: Any = typer.BadParameter.__bases__[0]
    if not all(_is_unicode(word) for word in words):
        return _refuse("the command line is not UTF-8 text: set a UTF-8 locale, or give the prompt as `-`", words)
    try:
        # Not `app(words)`: that turns a broken pipe into exit code 1, which here means that texts differ.
        group: Any = typer.main.get_command(app)
        with group.make_context("outrider", words or ["--help"]) as context:
            group.invoke(context)
        return 0
    except typer.Exit as done:
        return done.exit_code
    except OutriderError as error:
        return _refuse(str(error), words)
    except usage_error as error:
        return _refuse(f"{error.format_message().rstrip('.')}: see `outrider --help`", words)
    except typer.Abort:
        return EXIT_INTERRUPTED


def _prepare_streams() -> None:
    """Streams that were closed lead nowhere; a model may say what this terminal cannot show, a person may not."""
    for name, mode, errors in (("stdin", "r", "strict"), ("stdout", "w", "replace"), ("stderr", "w", "replace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (as long as the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _fall_silent() -> None:
    """Of the processes that share a target the first one speaks; why another one fails, it learns and says."""
    for name in ("stdout", "stderr"):
        setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (as long as the process)


def _is_unicode(text: str) -> bool:
    """Whether no byte of the command line was left undecoded (Python keeps those as lone surrogates)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _refuse(sentence: str, words: Sequence[str]) -> int:
    sys.stderr.write(f"outrider: {sentence}\n")
    if "--json" in words:
        sys.stdout.write(json.dumps({"error": sentence}) + "\n")
    return EXIT_REFUSED
