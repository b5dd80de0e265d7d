"""Who may wait: a bounded number of samples, of which no client keeps more than its share once others come."""

from __future__ import annotations

import threading
from collections import Counter

from outrider.server.errors import ApiError
from outrider.server.job import Job


class Lobby:
    """The jobs that run or wait; any thread may use it.

    While there is room everybody comes in. Where there is none, whoever holds less than another one comes in all the
    same, and the newest of the largest holder's jobs that have brought nothing yet goes; so does one that yields to it.

    Args:
        most: samples in all.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_open = 0
        self._jobs: dict[Job, None] = {}  # by arrival
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def enter(self, job: Job) -> list[Job] | None:
        """Let a job in; returns those that must go for it, which are not counted any more. None: it must not come in.

        Raises:
            ApiError: 400, it could never come in.
        """
        if job.num_samples > self.most:
            raise ApiError(400, f"{job.num_samples} samples are more than the queue holds ({self.most}): ask for less")
        with self._lock:
            gone: list[Job] = []
            while self.num_open + job.num_samples > self.most:
                crowding = self._crowding(job)
                if crowding is None:
                    for one in gone:
                        self._count(one)
                    return None
                self._drop(crowding)
                gone.append(crowding)
            self._count(job)
            return gone

    def leave(self, job: Job) -> None:
        """A job is over."""
        with self._lock:
            if job in self._jobs:
                self._drop(job)

    def keep(self, job: Job) -> None:
        """A job that should have gone has brought something meanwhile, and stays, be it one too many."""
        with self._lock:
            self._count(job)

    def _crowding(self, job: Job) -> Job | None:
        """Whose turn it is to go for a job: none where its own client would then hold most."""
        after, found = self._held[job.client] + job.num_samples, None
        for one in self._jobs:
            is_more = one.priority == job.priority and self._held[one.client] - one.num_samples >= after
            if one.first_token is None and (one.priority > job.priority or is_more):
                rank = (one.priority, self._held[one.client])
                if found is None or rank >= (found.priority, self._held[found.client]):
                    found = one
        return found

    def _count(self, job: Job) -> None:
        self._jobs[job] = None
        self._held[job.client] += job.num_samples
        self.num_open += job.num_samples

    def _drop(self, job: Job) -> None:
        del self._jobs[job]
        self._held[job.client] -= job.num_samples
        self.num_open -= job.num_samples
        if not self._held[job.client]:
            del self._held[job.client]
