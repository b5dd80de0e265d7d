"""`outrider chat`: a conversation that keeps its keys and values between turns."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from outrider.cli.generate import stream
from outrider.cli.options import Model, Settings, takes
from outrider.cli.render import notes, speed_line
from outrider.cli.session import session
from outrider.config import EngineConfig
from outrider.errors import RequestError
from outrider.request import SamplingParams

COMMANDS = {
    "/exit": "leave (so does end of input)",
    "/reset": "forget the conversation",
    "/undo": "take back the last turn",
    "/help": "show these commands",
}


@takes(EngineConfig, SamplingParams)
def chat(
    model: Model,
    *,
    settings: Settings,
    system: Annotated[str, typer.Option(metavar="TEXT", help="A system message that opens the conversation.")] = "",
) -> None:
    """Talk with a model; Ctrl-C stops an answer, a second one at the prompt leaves."""
    params = settings.params()
    if params.n != 1:
        raise RequestError(f"n={params.n} makes no sense in a chat: leave --n out")
    opening = [{"role": "system", "content": system}] if system else []
    console = notes()
    with session(model, settings.engine) as llm:
        console.print("Ask something; /help lists commands.", style="dim")
        messages = list(opening)
        while (line := _read()) is not None:
            if line.startswith("/"):
                if line == "/exit":
                    return
                messages = _command(line, messages, opening)
            elif line:
                messages = _turn(llm, [*messages, {"role": "user", "content": line}], params)


def _read() -> str | None:
    """The next line of the user, or None at the end of input; a prompt is shown at a terminal only.

    Raises:
        RequestError: for bytes that are not UTF-8.
    """
    try:
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            return line.strip() if line else None
        import readline  # noqa: F401  (gives `input` history and editing)

        return input("> ").strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise RequestError("standard input is not UTF-8 text: convert it first") from error


def _command(line: str, messages: list[dict[str, str]], opening: list[dict[str, str]]) -> list[dict[str, str]]:
    """Carry out a command that stays in the chat and return the conversation after it."""
    console = notes()
    if line == "/reset":
        console.print("forgotten", style="dim")
        return list(opening)
    if line == "/undo":
        console.print("taken back" if len(messages) > len(opening) else "nothing to take back", style="dim")
        return messages[: max(len(opening), len(messages) - 2)]
    if line != "/help":
        console.print(f"unknown command {line}", style="yellow", markup=False)
    for name, meaning in COMMANDS.items():
        console.print(f"  {name:8} {meaning}", markup=False)
    return messages


def _turn(llm: Any, messages: list[dict[str, str]], params: SamplingParams) -> list[dict[str, str]]:
    """Stream one answer; a turn that fails or is stopped leaves the conversation as it was before it."""
    try:
        result = stream(llm, messages, params)
    except KeyboardInterrupt:
        notes().print("\nstopped; this turn is forgotten", style="yellow")
        return messages[:-1]
    except RequestError as error:
        sys.stderr.write(f"outrider: {error}\n")
        return messages[:-1]
    notes().print(speed_line(result), style="dim", markup=False)
    return [*messages, {"role": "assistant", "content": result.text}]
