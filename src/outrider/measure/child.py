"""A job in a process of its own: `python -m outrider.measure.MODULE JOB.json` writes JOB.out, or its error is told."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError

PATIENCE = 900.0
"""Seconds that a process may take, its start included."""


class ChildError(OutriderError):
    """A process that did not do its job; the last error that it told."""


def run_child(
    module: str, job: Callable[[Path], Mapping[str, Any]], environment: Mapping[str, str], patience: float = PATIENCE
) -> dict[str, Any]:
    """What the process wrote.

    Args:
        module: of `outrider.measure`. job: given a folder that lasts as long as the process, JSON.
        environment: of the process, all of it.

    Raises:
        ChildError: if it died, took longer than `patience` seconds, or wrote no JSON.
    """
    with tempfile.TemporaryDirectory() as room:
        file = Path(room) / "job.json"
        file.write_text(json.dumps(job(Path(room))))
        command = [sys.executable, "-m", f"outrider.measure.{module}", str(file)]
        try:
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience, check=True)
            found: dict[str, Any] = json.loads(file.with_suffix(".out").read_text())
        except subprocess.CalledProcessError as error:
            lines = [line for line in (error.stderr or "").strip().splitlines() if "Error" in line] or ["it died"]
            raise ChildError(lines[-1][:300]) from error
        except (subprocess.TimeoutExpired, OSError, ValueError) as error:
            raise ChildError(first_line(error)) from error
    return found


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
