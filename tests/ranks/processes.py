"""Starts the ranks of a job of the tests, with the environment that `torchrun` makes, and collects what they wrote.

They are forked from a process that has imported everything once, since imports take longer than most of these tests.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


@dataclass
class Job:
    """Running ranks; each writes into `folder`."""

    folder: Path
    ranks: list[BaseProcess]

    def wait(self, seconds: float = 120) -> list[int | None]:
        """Exit codes, by rank."""
        try:
            return [self.code(rank, seconds) for rank in range(len(self.ranks))]
        finally:
            self.stop()

    def code(self, rank: int, seconds: float) -> int | None:
        """Of one rank, once it has ended; None where it does not."""
        self.ranks[rank].join(seconds)
        return self.ranks[rank].exitcode

    def stop(self) -> None:
        for rank in self.ranks:
            if rank.is_alive():
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
            if time.monotonic() > until or not any(rank.is_alive() for rank in self.ranks):
                raise AssertionError("\n".join(self.said(rank)[-2000:] for rank in range(len(self.ranks))))
            time.sleep(0.02)
        return json.loads(path.read_text())


def start(folder: Path, size: int, scenario: str, *words: Any, **environment: str) -> Job:
    """Run a scenario of `tests.ranks.job` on so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.job"])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    ranks: list[BaseProcess] = []
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **meeting, **environment}
        ranks.append(context.Process(target=_run, args=(str(folder), rank, own, scenario, words), daemon=True))
        ranks[-1].start()
    return Job(folder, ranks)


def write(folder: str | Path, name: str, told: Any) -> None:
    """As `Job.told` reads it: whole, or not there."""
    path = Path(folder) / f"{name}.json"
    path.with_suffix(".part").write_text(json.dumps(told))
    path.with_suffix(".part").rename(path)


def _run(folder: str, rank: int, environment: dict[str, str], scenario: str, words: Sequence[Any]) -> None:
    from tests.ranks import job

    os.dup2(os.open(f"{folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(environment)
    try:
        job.run(folder, scenario, words)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # a forked process leaves these out
