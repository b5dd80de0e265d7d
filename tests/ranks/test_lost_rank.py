"""A rank that is lost ends the job with one clear sentence, within seconds, whoever it is and whatever they do."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.ranks.processes import Job, start


def lose(job: Job, rank: int, how: signal.Signals = signal.SIGKILL) -> float:
    """Seconds until all others have ended."""
    job.told("runs")
    os.kill(job.ranks[rank].pid or 0, how)
    began = time.monotonic()
    try:
        for other in (r for r in range(len(job.ranks)) if r != rank):
            assert job.code(other, 40) == 1
    finally:
        job.stop()
    return time.monotonic() - began


def test_a_killed_rank_ends_the_job(tmp_path) -> None:
    job = start(tmp_path, 2, "endless")
    assert lose(job, 1) < 5
    assert job.sentences(0) == ["outrider: rank 1 of 2 is gone: the job ends here, start it again"]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["endless", "idle"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_any_of_four_may_be_killed(tmp_path, scenario: str, rank: int) -> None:
    job = start(tmp_path, 4, scenario)
    job.told("runs")
    job.ranks[rank].kill()
    began = time.monotonic()
    speaker = 0 if rank else 1
    try:
        assert job.code(speaker, 30) == 1
        assert None not in [job.code(other, 30) for other in range(4)]
    finally:
        job.stop()
    assert time.monotonic() - began < 12
    assert job.sentences(speaker) == [f"outrider: rank {rank} of 4 is gone: the job ends here, start it again"]
    assert not any(job.sentences(other) for other in range(4) if other != speaker)
    assert not any("Traceback" in job.said(other) for other in range(4))


@pytest.mark.slow
def test_a_rank_that_stands_still_ends_the_job(tmp_path) -> None:
    job = start(tmp_path, 2, "endless")
    assert lose(job, 1, signal.SIGSTOP) < 20
    assert job.sentences(0) == [
        "outrider: rank 1 of 2 gave no sign of life for 10 seconds: the job ends here, start it again"
    ]
