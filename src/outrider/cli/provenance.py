"""Where a trained drafter comes from: the command, the commit, the versions, the data, and what it was seen to do."""

from __future__ import annotations

import datetime
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import outrider


def provenance(
    drafter: str, described: Mapping[str, Any], data: Mapping[str, Any], trained: Any, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """Where the drafter comes from, and what it was seen to do."""
    import torch

    from outrider.engine.resolved import versions

    on_gpu = torch.cuda.is_available()
    return {
        "drafter": drafter,
        "target": dict(described),
        "command": shlex.join(["outrider", *sys.argv[1:]]),
        "commit": commit(),
        "date": today(),
        "device": torch.cuda.get_device_name() if on_gpu else "a CPU",
        "versions": versions(),
        "data": dict(data),
        "training": trained.figures,
        "figures": dict(figures),
        "curve": trained.curve,
    }


def today() -> str:
    """The date, as 2026-01-31."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def commit() -> str:
    """Of the checkout that runs, with "-dirty" where it was changed since; else what the build recorded."""
    package = Path(outrider.__file__).resolve().parent
    root = package.parents[1]
    if (root / ".git").exists():  # any other checkout around it is not this package's own
        with suppress(OSError, subprocess.CalledProcessError):
            command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    with suppress(OSError):
        return (package / "commit.txt").read_text().strip()
    return f"unknown (version {outrider.__version__}, no checkout)"
