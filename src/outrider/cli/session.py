"""Opens the engine for a verb: fetches a missing alias, loads, tells what was decided, and always closes; and logs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from outrider.cli.render import notes, progress_bar
from outrider.config import EngineConfig


def fetch_if_missing(model: str) -> None:
    """Bring a model that is an alias and not here yet; anything else is left to the loader. Of the processes that
    `torchrun` started on a machine the first one does it.

    Raises:
        FetchError: if the download fails.
    """
    from outrider.models.fetch import ALIASES, fetch

    if model in ALIASES and os.environ.get("LOCAL_RANK", "0") == "0":
        with progress_bar(f"fetching {model}") as update:
            fetch(model, update)


@contextmanager
def session(model: str, engine: Mapping[str, Any]) -> Iterator[Any]:
    """An `LLM` for the length of a `with` block.

    Raises:
        OutriderError: for settings, models or memory that cannot be used.
    """
    EngineConfig.of(model=model, **engine)  # a wrong setting is refused at once, before anything is fetched or loaded
    fetch_if_missing(model)
    from outrider import LLM

    console = notes()
    with progress_bar(f"loading {model}") as update:
        update("weights", 0, None)  # something moves while the first of them are looked for
        llm = LLM(model, progress=update, **engine)
    try:
        decided = llm.resolved
        summary = f"{decided.dtype} on {decided.device}, {decided.kernels} kernels, drafter {decided.drafter}"
        lines = f"{model}: {summary}, exact by {decided.exactness}", f"memory: {decided.memory.sentence()}"
        for line in (*lines, *decided.notes):
            console.print(line, style="dim", markup=False)
        yield llm
    finally:
        llm.close()


@contextmanager
def logs(formatter: logging.Formatter) -> Iterator[None]:
    """All loggers write to standard error, in one form, and nothing stays behind in a process that goes on."""
    handler, root = logging.StreamHandler(sys.stderr), logging.getLogger()
    handler.setFormatter(formatter)
    before, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)
