"""Reports as files, and where they come from: JSON, Markdown and one page of HTML, each whole or not there at all."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.cli.provenance import commit, today
from outrider.errors import ConfigError
from outrider.measure.page import Section, markdown, page


def room(folder: str) -> Path:
    """The folder for a report, made now: a mistake is refused before an hour of measuring, not after it.

    Raises:
        ConfigError: it cannot be made.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be a folder ({error.strerror or error}): give another") from error
    return path


def save(
    folder: Path,
    stem: str,
    title: str,
    report: Mapping[str, Any],
    sections: Sequence[Section],
    is_whole: bool = True,
) -> None:
    """Write `stem`.json, .md and, of a report that is whole, .html; a run that is stopped meanwhile leaves those before
    it whole."""
    texts = {"json": json.dumps(report, indent=1, allow_nan=False) + "\n", "md": markdown(sections)}
    if is_whole:
        texts["html"] = page(title, sections)
    for ending, text in texts.items():
        written = folder / f"{stem}.{ending}.part"
        written.write_text(text, encoding="utf-8")
        written.replace(folder / f"{stem}.{ending}")


def origin() -> dict[str, Any]:
    """What every report says of itself: the command, the commit, the date, the machine, the versions."""
    from outrider.engine.resolved import versions

    return {
        "command": shlex.join(["outrider", *sys.argv[1:]]),
        "commit": commit(),
        "date": today(),
        "machine": machine(),
        "versions": versions(),
    }


def machine() -> str:
    """The GPU where there is one, else the processor, in words."""
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{count} cores, {_processor()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
