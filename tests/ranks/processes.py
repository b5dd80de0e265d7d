"""Starts the ranks of a job of the tests, as `torchrun` would but sooner, and collects what they wrote."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outrider

ROOT = Path(__file__).parents[2]


@dataclass
class Job:
    """Running ranks; each writes into `folder`."""

    folder: Path
    ranks: list[subprocess.Popen[str]]

    def wait(self, seconds: float = 120) -> list[int]:
        """Exit codes, by rank."""
        try:
            return [rank.wait(timeout=seconds) for rank in self.ranks]
        finally:
            self.stop()

    def stop(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()

    def said(self, rank: int) -> str:
        """What a rank wrote to its standard error."""
        return (self.folder / f"stderr-{rank}").read_text()

    def sentences(self, rank: int) -> list[str]:
        """What Outrider itself said there; libraries have notices of their own."""
        return [line for line in self.said(rank).splitlines() if line.startswith("outrider: ")]

    def told(self, name: str, seconds: float = 120) -> Any:
        """What was written as JSON under that name, once it is there."""
        path, until = self.folder / f"{name}.json", time.monotonic() + seconds
        while not path.is_file():
            if time.monotonic() > until or all(rank.poll() is not None for rank in self.ranks):
                raise AssertionError("\n".join(self.said(rank)[-2000:] for rank in range(len(self.ranks))))
            time.sleep(0.02)
        return json.loads(path.read_text())


def start(folder: Path, size: int, *words: str, **environment: str) -> Job:
    """`python -m tests.ranks.job WORDS`, `size` times."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        path = f"{Path(outrider.__file__).parents[1]}{os.pathsep}{ROOT}"
        command = [sys.executable, "-m", "tests.ranks.job", str(folder), *words]
        with (folder / f"stderr-{rank}").open("w") as errors:
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, **own, **meeting, "PYTHONPATH": path, **environment},
                    stderr=errors,
                    text=True,
                )
            )
    return Job(folder, ranks)


def write(folder: str | Path, name: str, told: Any) -> None:
    """As `Job.told` reads it: whole, or not there."""
    path = Path(folder) / f"{name}.json"
    path.with_suffix(".part").write_text(json.dumps(told))
    path.with_suffix(".part").rename(path)
