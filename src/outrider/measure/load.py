"""Load on any OpenAI-compatible server: arrivals, latencies as its clients see them, and what of it was good enough."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from outrider.errors import ConfigError
from outrider.measure.intervals import percentiles
from outrider.measure.prompts import Messages, Prompt
from outrider.measure.servers import address, first_model

PLAIN = MappingProxyType({"speculation": {"enabled": False}})
"""What a body says to our own server to be drawn plainly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One way of asking: so many clients at once, each asking again when it was answered, or arrivals at a rate.

    Attributes:
        clients: at once; None with a rate. rate: requests a second, at times of their own (Poisson); None with clients.
    """

    clients: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.clients} clients" if self.clients is not None else f"{self.rate:g} requests/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a request must keep to count as good: seconds to its first token, and mean seconds a token behind it."""

    first_token: float = 2.0
    token: float = 0.2


@dataclass(slots=True)
class Sample:
    """One request as its client saw it.

    Attributes:
        seconds: from sending to the end. first: to the first text. gaps: between pieces of text. tokens: as the server
            counts them. error: why there was no answer.
    """

    seconds: float = 0.0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    speculation: dict[str, Any] | None = None
    error: str | None = None

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds a token behind the first."""
        return None if self.first is None or self.tokens < 2 else (self.seconds - self.first) / (self.tokens - 1)

    def is_good(self, goal: Goal) -> bool:
        if self.error is not None or self.first is None or self.first > goal.first_token:
            return False
        return self.token_seconds is None or self.token_seconds <= goal.token


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a level brought; seconds are percentiles over requests, `between` over all gaps of all requests."""

    level: str
    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    goodput: float
    first_token: dict[str, float]
    token: dict[str, float]
    between: dict[str, float]
    whole: dict[str, float]
    tau: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def outcome(level: str, samples: Sequence[Sample], seconds: float, goal: Goal) -> Outcome:
    """Sum up a level, by its name, that took so many seconds. `goodput` counts requests a second that kept the goal."""
    answered = [sample for sample in samples if sample.error is None]
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    told = [sample.speculation for sample in answered if sample.speculation is not None]
    cycles = sum(each["cycles"] for each in told)
    return Outcome(
        level=level,
        requests=len(samples),
        failed=len(samples) - len(answered),
        errors=errors,
        seconds=seconds,
        tokens_per_second=sum(sample.tokens for sample in answered) / seconds,
        requests_per_second=len(answered) / seconds,
        goodput=sum(sample.is_good(goal) for sample in samples) / seconds,
        first_token=percentiles([s.first for s in answered if s.first is not None]),
        token=percentiles([s.token_seconds for s in answered if s.token_seconds is not None]),
        between=percentiles([gap for sample in answered for gap in sample.gaps]),
        whole=percentiles([sample.seconds for sample in answered]),
        tau=1 + sum(each["accepted"] for each in told) / cycles if cycles else None,
    )


class Client:
    """Asks one server.

    Args:
        url: with or without `/v1`. model: its name there; None takes the first one. key: None without one.
        body: fields that every request carries.

    Raises:
        ConfigError: httpx is not installed.
    """

    def __init__(self, url: str, model: str | None, key: str | None, body: dict[str, Any]) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError('load needs httpx: install "outrider[serve]"') from error
        self._httpx = httpx
        self.url = address(url)
        self.model = model
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.body = body

    async def run(
        self, level: Level, prompts: Sequence[Messages], count: int, seed: int = 0
    ) -> tuple[list[Sample], float]:
        """So many requests, prompts in turns; and the seconds that all of them took.

        Raises:
            ConfigError: the server cannot be reached, or has no model.
        """
        rng = random.Random(seed)
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with self._httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=None, limits=limits
        ) as http:
            model = await first_model(http, self.url, self.model)
            began = time.perf_counter()
            asks = [(prompts[number % len(prompts)], model) for number in range(count)]
            if level.rate is not None:
                tasks = []
                for ask in asks:
                    tasks.append(asyncio.create_task(self._ask(http, *ask)))
                    await asyncio.sleep(rng.expovariate(level.rate))
                samples = list(await asyncio.gather(*tasks))
            else:
                waiting = iter(asks)
                clients = (self._one_after_another(http, waiting) for _ in range(min(level.clients or 1, count)))
                samples = [sample for found in await asyncio.gather(*clients) for sample in found]
            return samples, time.perf_counter() - began

    async def _one_after_another(self, http: Any, waiting: Any) -> list[Sample]:
        return [await self._ask(http, *ask) for ask in waiting]

    async def _ask(self, http: Any, messages: Messages, model: str) -> Sample:
        body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        sample, began = Sample(), time.perf_counter()
        last = began
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body | self.body) as answer:
                if answer.status_code != 200:
                    sample.error = f"status {answer.status_code}"
                    return sample
                async for event in _events(answer):
                    if "error" in event:
                        sample.error = "an error within the stream"
                        return sample
                    if any(choice["delta"].get("content") for choice in event["choices"]):
                        now = time.perf_counter()
                        if sample.first is None:
                            sample.first = now - began
                        else:
                            sample.gaps.append(now - last)
                        last = now
                    usage = event.get("usage")
                    if usage:
                        sample.tokens = usage["completion_tokens"]
                        sample.speculation = usage.get("speculation")
        except self._httpx.HTTPError as error:
            sample.error = type(error).__name__
        finally:
            sample.seconds = time.perf_counter() - began
        return sample


def messages_of(prompt: Prompt) -> Messages:
    """A prompt as a chat's messages."""
    content = prompt.content
    assert not isinstance(content, tuple), "prompts of a file are texts or messages"
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


async def _events(answer: Any) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])
