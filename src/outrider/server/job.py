"""A job on its way between two threads: prompts in, pieces out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.ends import Emission
from outrider.engine.text import TextStream
from outrider.record import CycleTrace
from outrider.request import Request, SamplingParams, TokenLogprob
from outrider.result import Result


@dataclass(frozen=True, slots=True)
class Piece:
    """What one cycle brought to one sample of a job.

    Attributes:
        index: of the sample: prompt times n plus sample. tokens: the first `num_accepted` were guesses.
        logprobs: one a token, where asked for. prompt_logprobs: on the first one. trace, seconds: of the cycle,
            where asked for, and the sample's estimated speed_up until then. result: on the last one, with what
            ended it if that was an error.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    trace: CycleTrace | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    speed_up: dict[str, float] | None = None
    result: Result | None = None
    error: Exception | None = None


@dataclass(slots=True)
class Sample:
    """One request of a job on the engine's side."""

    index: int
    request: Request
    stream: TextStream
    inbox: deque[Emission]
    told: int = 0
    first: float = 0.0
    last: float = 0.0


class Job:
    """Some prompts of one HTTP request, all with the same params, on their way through the engine.

    Iterating gives pieces until every sample has ended, and raises what went wrong; `Bridge.give_up` must follow,
    whatever happened.

    Args:
        deadline, arrived: on the monotonic clock; it arrived now where that is None. client, priority: as in `Request`.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        deadline: float | None,
        client: str = "",
        priority: int = 0,
        arrived: float | None = None,
    ) -> None:
        self.prompts = tuple(prompts)
        self.params = params
        self.deadline = deadline
        self.client = client
        self.priority = priority
        self.arrived = time.monotonic() if arrived is None else arrived
        self.first_token: float | None = None
        self.num_samples = len(self.prompts) * params.n
        self.samples: list[Sample] = []  # of the engine thread
        self.is_over = False  # of the engine thread
        self._left = self.num_samples
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    def put(self, batch: Sequence[Piece | Exception]) -> None:
        """Hand pieces over, from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, batch)
        except RuntimeError:  # the loop is gone, and with it everybody who could have read them
            self.is_over = True

    def _take(self, batch: Sequence[Piece | Exception]) -> None:
        for piece in batch:
            self._pieces.put_nowait(piece)

    @property
    def has_piece(self) -> bool:
        """Whether the next one is there already."""
        return not self._pieces.empty()

    def __aiter__(self) -> Job:
        return self

    async def __anext__(self) -> Piece:
        if not self._left:
            raise StopAsyncIteration
        piece = await self._pieces.get()
        if isinstance(piece, Exception):
            self._left = 0
            raise piece
        self._left -= piece.result is not None
        return piece
