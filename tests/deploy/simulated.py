"""A server of a fixed service time, in the place of one with a model: what is tested is what is around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import ray
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from outrider.server.goodput import Goodput


class Simulated:
    """Answers with what was asked.

    A body has a `nonce`, and may have `seconds` of its own; with `pieces` a stream of so many, with as long between.

    Args:
        seconds: that an answer takes. slots: answers at once; others wait. goal: seconds within which one is good.
    """

    def __init__(self, seconds: float, slots: int, goal: float = 60.0) -> None:
        self.app = Starlette(routes=[Route("/v1/completions", self.complete, methods=["POST"])])
        self.seconds = seconds
        self.slots = asyncio.Semaphore(slots)
        self.open = 0
        self.goodput = Goodput(goal, goal)
        self.registry = CollectorRegistry()
        self.ended = Counter("outrider_generation_tokens", "Answers.", registry=self.registry)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        self.open += 1
        try:
            async with self.slots:
                yield
        finally:
            self.open -= 1

    async def complete(self, request: Request) -> Response:
        ask, began = await request.json(), time.monotonic()
        if not ask.get("pieces"):
            async with self.slot():
                await asyncio.sleep(ask.get("seconds") or self.seconds)
            self.ended.inc()
            waited = time.monotonic() - began
            self.goodput.judge(waited, waited, 1)
            return JSONResponse({"nonce": ask["nonce"], "node": ray.get_runtime_context().get_node_id()})

        async def events() -> AsyncIterator[str]:
            async with self.slot():
                for i in range(ask["pieces"]):
                    await asyncio.sleep(self.seconds)
                    yield f'data: {{"nonce": {ask["nonce"]}, "piece": {i}}}\n\n'
            self.ended.inc()
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def is_alive(self) -> bool:
        return True

    def num_open(self) -> int:
        return self.open

    def metrics(self) -> bytes:
        return generate_latest(self.registry)

    def rates(self) -> tuple[float, float]:
        return self.goodput.rates()
