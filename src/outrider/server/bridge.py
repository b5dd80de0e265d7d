"""One engine thread, many requests: asyncio hands jobs in and reads pieces out, and never touches a tensor."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque

from outrider.engine.ends import Emission
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.record import Record
from outrider.request import Phase
from outrider.server.errors import ApiError, of_error
from outrider.server.job import Job, Piece, Sample
from outrider.server.lobby import Lobby
from outrider.server.metrics import Metrics

TYPICAL_SECONDS = 1.0
"""How long a request is taken to need before any has ended."""
LAST_PASS = 30.0
"""Seconds for the pass that is under way when a server ends; a device that hangs must not keep the process."""


class Bridge:
    """Runs an engine in a thread of its own.

    Args:
        max_queue: samples that may wait beside those that run.
    """

    def __init__(self, llm: LLM, metrics: Metrics, max_queue: int) -> None:
        self.llm = llm
        self.metrics = metrics
        self.lobby = Lobby(llm.config.max_requests + max_queue)
        self.is_closing = False
        self._seconds = TYPICAL_SECONDS  # a running mean of what a request takes
        self._lock = threading.Lock()
        self._commands: queue.SimpleQueue[tuple[str, Job | None]] = queue.SimpleQueue()
        self._jobs: list[Job] = []  # of the engine thread
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Samples that run or wait."""
        return self.lobby.num_open

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            ApiError: 429 where the queue is full and the client has its share of it, 400 where it could never hold so
                many, 503 where the server stops.
        """
        with self._lock:
            if self.is_closing or not self.is_alive:
                raise closing()
            gone = self.lobby.enter(job)
            if gone is None:
                raise self.full("try again later")
            for one in gone:
                self._commands.put(("make_room", one))
            self._commands.put(("begin", job))

    def full(self, remedy: str, reason: str = "queue_full") -> ApiError:
        """The answer to whoever must wait elsewhere; its Retry-After is when about half of those here have ended."""
        self.metrics.refused.labels(reason).inc()
        count, most = self.num_open, self.lobby.most
        seconds = max(1, math.ceil(self._seconds * count / self.llm.config.max_requests / 2))
        said = f"the queue holds {most} requests and has no room for this one: {remedy}"
        return ApiError(429, said, code="queue_full", retry_after=seconds)

    def give_up(self, job: Job) -> None:
        """Nobody reads this job any more: what still runs of it is aborted before the next cycle."""
        self._commands.put(("end", job))

    def drain(self) -> None:
        """Take no more jobs; those that run go on."""
        self.is_closing = True

    def stop(self) -> None:
        """Fail what still runs; the thread ends behind that."""
        with self._lock:  # nothing is handed in behind the last command
            self.is_closing = True
            self._commands.put(("stop", None))

    def close(self, timeout: float | None = None) -> None:
        """Stop, and wait for the thread's end; one that hangs in its pass is left behind, which the log tells."""
        self.stop()
        if self.is_alive:
            self._thread.join(timeout)
        if self.is_alive:
            logging.getLogger("outrider").error("the engine's pass has not ended after %g s and is left", timeout)

    # From here on, all is done by the engine's thread.

    def _run(self) -> None:
        try:
            while self._obey():
                self._expire()
                if self._jobs:
                    self._cycle()
        finally:
            with self._lock:  # nothing is handed in behind this, whatever ended the loop
                self.is_closing = True
            while not self._commands.empty():
                verb, job = self._commands.get()
                if job is not None and verb == "begin":
                    self._jobs.append(job)
            for job in tuple(self._jobs):
                self._fail(job, closing())
            self.metrics.gauge(self.llm)

    def _obey(self) -> bool:
        """Carry out what was commanded; waits for a command where nothing runs. False: the end."""
        while True:
            try:
                verb, job = self._commands.get(block=not self._jobs)
            except queue.Empty:
                return True
            if job is None:
                return False
            if verb == "begin":
                self._begin(job)
            elif verb == "make_room":
                self._make_room(job)
            else:
                self._end(job)

    def _begin(self, job: Job) -> None:
        if job.is_over:  # its client left before it came here
            return
        self._jobs.append(job)
        try:
            for prompt in job.prompts:
                for request in self.llm.requests(prompt, job.params, job.client, job.priority):
                    inbox: deque[Emission] = deque()
                    stream = self.llm.begin(request, inbox)
                    job.samples.append(Sample(len(job.samples), request, stream, inbox))
        except Exception as error:  # whatever it is, it is this request's alone
            self._fail(job, error)

    def _end(self, job: Job) -> None:
        """Free all that it holds; whoever still waits hears nothing."""
        if job.is_over:
            return
        job.is_over = True
        for sample in job.samples:
            if not sample.request.is_finished:
                self.metrics.finished("abort", sample.request)
            self.llm.end(sample.request)
        self.lobby.leave(job)
        if job in self._jobs:
            self._jobs.remove(job)
            self.metrics.gauge(self.llm)

    def _make_room(self, job: Job) -> None:
        """Fail a job that took more than its client's share of a full queue, unless it has got on meanwhile."""
        if job.is_over:
            return
        if job.first_token is not None:
            self.lobby.keep(job)
            return
        self._fail(job, self.full("others came and yours were most, so try again later", "over_share"))

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, (OutriderError, ApiError)):
            logging.getLogger("outrider").error("a request failed", exc_info=error)
        self._end(job)
        job.put([of_error(error)])

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._jobs if job.deadline is not None and now > job.deadline]:
            waited = now - job.arrived
            for _ in range(job.num_samples):
                self.metrics.goodput.miss()
            self._fail(job, ApiError(504, f"not done after {waited:.1f} s: raise timeout, or ask for less"))

    def _cycle(self) -> None:
        running = [s.request for job in self._jobs for s in job.samples if not s.request.is_finished]
        try:
            record = self.llm.advance(running)
        except Exception as error:  # whoever took part in this cycle cannot go on; those that wait can
            part = [j for j in self._jobs if any(s.request.phase is Phase.RUNNING for s in j.samples)]
            for job in part or tuple(self._jobs):
                self._fail(job, error)
            return
        now = time.monotonic()
        for job in tuple(self._jobs):
            try:
                self._deliver(job, record, now)
            except Exception as error:  # as in `_begin`: nobody else suffers from it
                self._fail(job, error)
        if record is not None:
            self.metrics.cycle(record, self.llm)

    def _deliver(self, job: Job, record: Record | None, now: float) -> None:
        batch: list[Piece | Exception] = []
        for sample in job.samples:
            while sample.inbox:
                batch.append(self._piece(job, sample, sample.inbox.popleft(), record, now))
        if batch:
            job.put(batch)
        if all(sample.request.is_finished for sample in job.samples):
            self._seconds += 0.1 * (now - job.arrived - self._seconds)
            self._end(job)

    def _piece(self, job: Job, sample: Sample, emission: Emission, record: Record | None, now: float) -> Piece:
        request, first, count = sample.request, sample.told, len(emission.tokens)
        is_last = request.is_finished and not sample.inbox
        if count:
            sample.told += count
            self.metrics.delivered(count, first, now - (sample.last or job.arrived))
            sample.first = sample.first or now
            sample.last = now
            job.first_token = job.first_token or now
        if is_last:
            waited = (sample.first or now) - job.arrived
            self.metrics.finished(str(request.finish_reason), request, now - job.arrived, waited)
        trace = request.cycles.pop(0) if request.cycles and count else None
        return Piece(
            sample.index,
            emission.text,
            emission.tokens,
            emission.num_accepted,
            tuple(request.logprobs[first : first + count]),
            () if first else tuple(request.prompt_logprobs),
            trace,
            _seconds(record) if trace is not None else {},
            request.tally.saving.to_json() if trace is not None else None,
            self.llm.result(request, sample.stream) if is_last else None,
            request.error if is_last else None,
        )


def closing() -> ApiError:
    """The answer to whoever asks a server that stops."""
    return ApiError(503, "the server is shutting down: ask another one, or later", retry_after=10)


def _seconds(record: Record | None) -> dict[str, float]:
    """Seconds of the pass by part; none where another thread made it."""
    if record is None:
        return {}
    return {
        "draft": record.seconds_draft,
        "verify": record.seconds_verify,
        "sample": record.seconds_sample,
        "total": record.seconds_total,
    }
