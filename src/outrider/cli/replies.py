"""`outrider replies`: the target's own replies as a corpus, from which drafters are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.options import Json, Model, PromptFiles, Settings, takes
from outrider.cli.render import notes, print_json, write
from outrider.cli.session import fetch_if_missing, session
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.measure.prompts import read_prompts
from outrider.training.reply_settings import ReplySettings

GPU_REQUESTS = 512
CPU_REQUESTS = 32
CONTEXT = 1280
"""Positions of a conversation that are worth learning from; more would only cost slots."""


@takes(ReplySettings, EngineConfig)
def replies(
    target: Model,
    *,
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder of the corpus; a run that was killed goes on there.")],
    settings: Settings,
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="JSON lines; may be repeated; left out, the target makes up its own."),
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(metavar="T=SHARE", help="Share of the replies at a temperature; may be repeated, such as 0=0.5."),
    ] = None,
    rank: Annotated[int, typer.Option(metavar="N", help="Which of several processes that share the folder.")] = 0,
    world: Annotated[int, typer.Option(metavar="N", help="How many processes share the folder.")] = 1,
    as_json: Json = False,
) -> None:
    """Let the target reply to prompts, or to its own, in large batches; what is finished survives a kill."""
    shares: dict[str, Any] = {"temperatures": tuple(_share(text) for text in share)} if share else {}
    wanted = ReplySettings(**settings.replies, **shares)
    asked = read_all(prompts)
    with plain_engine(target, settings.engine) as llm:
        found = generate(llm, asked, out, wanted, rank, world)
    if as_json:
        print_json(found)
    else:
        write(f"{found['conversations']} conversations, {found['reply_tokens']} reply tokens in {out}\n")


def read_all(files: PromptFiles) -> list[Any] | None:
    """The prompts of all files; None where there are none."""
    return [prompt for file in files for prompt in read_prompts(file)] if files else None


@contextmanager
def plain_engine(target: str, engine: Mapping[str, Any]) -> Iterator[Any]:
    """Plain decoding of many requests at once, in one wide pass."""
    import torch

    from outrider.models.loader import max_positions

    fetch_if_missing(target)
    on_gpu = engine.get("device", "cuda" if torch.cuda.is_available() else "cpu") != "cpu"
    many = engine.get("max_requests", GPU_REQUESTS if on_gpu else CPU_REQUESTS)
    given = {
        "max_requests": many,
        "max_rows": many,
        "prefix_cache": False,
        "max_context": min(CONTEXT, max_positions(target)),
        **engine,
    }
    if on_gpu:
        given = {"dtype": "bfloat16", "pass_width": many, **given}
    with session(target, {**given, "drafter": "none"}) as llm:
        yield llm


def generate(
    llm: Any, asked: list[Any] | None, out: str | Path, settings: ReplySettings, rank: int = 0, world: int = 1
) -> dict[str, Any]:
    """As `training.replies.generate_replies`, telling how far it has got."""
    from outrider.training.replies import Progress, generate_replies

    console = notes()
    with console.status("replying") as status:

        def tell(progress: Progress) -> None:
            if progress.note:
                console.print(progress.note, style="dim", markup=False)
            rate = progress.reply_tokens / max(progress.seconds, 1e-9)
            status.update(f"{progress.conversations} replies, {progress.reply_tokens} tokens, {rate:.0f} tokens/s")

        return generate_replies(llm, asked, out, settings, rank=rank, world=world, progress=tell)


def _share(text: str) -> tuple[float, float]:
    heat, _, share = text.partition("=")
    try:
        return float(heat), float(share)
    except ValueError as error:
        raise ConfigError(f"--share {text!r} is not T=SHARE: give two numbers, such as 0.7=0.3") from error
