"""`outrider export`: a drafter written as vLLM, SGLang or TensorRT-LLM reads it, and what to start them with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Json
from outrider.cli.render import print_json, write
from outrider.cli.session import fetch_if_missing


def export(
    drafter: Annotated[
        str, typer.Argument(metavar="DIR", help="Folder or alias of a trained drafter, or folder of a head of others.")
    ],
    *,
    target: Annotated[str, typer.Option(metavar="MODEL", help="Alias, folder, .gguf file or hub id of its target.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; it must be new or empty.")],
    engine: Annotated[str, typer.Option(metavar="NAME", help="vllm, sglang or tensorrt-llm.")] = "vllm",
    guesses: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens a cycle there. Default: 5, or as the block has.")
    ] = None,
    target_there: Annotated[
        str | None, typer.Option(metavar="NAME", help="What that engine calls the target; else as here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a drafter for another engine, and print what to tell it; see docs/export.md."""
    from outrider.export.folder import export as written

    fetch_if_missing(target)
    told = written(drafter, target, out, engine, guesses, target_there)
    if as_json:
        print_json({"engine": told.engine, "folder": told.folder, "settings": dict(told.settings), "how": told.how})
    else:
        write(f"{told.folder} is written. {told.engine} is told of it so:\n\n{told.how}\n")
