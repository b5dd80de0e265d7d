"""From the command to the first token: with nothing compiled, and again with what the first start has left behind."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.config import cache_folder
from outrider.measure.child import ChildError, run_child

COLD, WARM = "cold: nothing is compiled", "warm: what was compiled is kept"
OWN_CACHES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that would lead to kernels compiled before."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a fresh process, or why there was none.

    Attributes:
        seconds: from the command until the first token of a reply. parts: seconds by part, as the process tells them.
    """

    kind: str
    seconds: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


def measure_starts(
    model: str, settings: Mapping[str, Any], prompt: Any, progress: Callable[[str], None] = lambda text: None
) -> list[Start]:
    """A cold and a warm start of a model, each in a process of its own, over a cache folder that is empty at first.

    What is cold is what is compiled: the files of the weights may lie in the system's own cache both times.

    Args:
        settings: of `EngineConfig`. prompt: as `LLM.generate` takes it, JSON.
    """
    with tempfile.TemporaryDirectory() as cache:
        models = cache_folder() / "models"
        if models.is_dir():
            (Path(cache) / "models").symlink_to(models.resolve(), target_is_directory=True)
        environment = {name: value for name, value in os.environ.items() if name not in OWN_CACHES}
        environment |= {"OUTRIDER_CACHE": cache}
        starts = []
        for kind in (COLD, WARM):
            progress(f"a start, {kind}")
            starts.append(_start(kind, model, settings, prompt, environment))
    return starts


def _start(kind: str, model: str, settings: Mapping[str, Any], prompt: Any, environment: Mapping[str, str]) -> Start:
    def job(room: Path) -> Mapping[str, Any]:
        return {"model": model, "settings": dict(settings), "prompt": prompt, "began": time.time()}

    try:
        found = run_child("start_run", job, environment)
    except ChildError as error:
        return Start(kind, error=str(error))
    return Start(kind, found["seconds"], found["parts"])
