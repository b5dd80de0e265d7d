"""Load on any OpenAI-compatible server: clients and arrivals, and each answer as its client sees it come."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from types import MappingProxyType
from typing import Any

from outrider.errors import ConfigError
from outrider.measure.outcomes import Level, Sample
from outrider.measure.prompts import Messages, Prompt
from outrider.measure.servers import address, first_model

PLAIN = MappingProxyType({"speculation": {"enabled": False}})
"""What a body says to our own server to be drawn plainly."""
TIMEOUT = 600.0
"""Seconds that one answer may take."""
FIGURE = re.compile(r'^outrider_(pass_seconds_total|memory_bytes)\{\w+="(\w+)"\} (\S+)$', re.MULTILINE)
"""What our own server tells of its time and its memory."""


class Client:
    """Asks one server.

    Args:
        url: with or without `/v1`. model: its name there; None takes the first one. key: None without one.
        body: fields that every request carries. timeout: seconds that one answer may take.

    Raises:
        ConfigError: httpx is not installed.
    """

    def __init__(
        self, url: str, model: str | None, key: str | None, body: dict[str, Any], timeout: float = TIMEOUT
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError('load needs httpx: install "outrider[serve]"') from error
        self._httpx = httpx
        self.url = address(url)
        self.model = model
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.body = body
        self.timeout = timeout

    async def figures(self) -> dict[str, dict[str, float]]:
        """Seconds of all passes so far by part, and bytes by purpose, as our own server tells them; another's: none."""
        async with self._httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=10) as http:
            try:
                answer = await http.get("/metrics")
            except self._httpx.HTTPError:
                return {}
        found: dict[str, dict[str, float]] = {}
        for name, label, value in FIGURE.findall(answer.text) if answer.status_code == 200 else ():
            found.setdefault(name, {})[label] = float(value)
        return found

    async def card(self) -> dict[str, Any]:
        """What our own server tells of its model; of another's no more than its name."""
        async with self._httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=10) as http:
            try:
                cards = (await http.get("/v1/models")).json()["data"]
                mine = next(card for card in cards if self.model in (None, card["id"]))
            except (self._httpx.HTTPError, ValueError, LookupError, TypeError, StopIteration):
                return {}
        return {name: mine[name] for name in ("id", "drafter", "depth", "width", "exactness") if name in mine}

    async def run(
        self, level: Level, prompts: Sequence[Messages], count: int, seed: int = 0, first: int = 0
    ) -> tuple[list[Sample], float]:
        """So many requests, prompts in turns, numbered from `first`; and the seconds that all of them took.

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
            asks = [(number, prompts[number % len(prompts)], model) for number in range(first, first + count)]
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

    async def _ask(self, http: Any, number: int, messages: Messages, model: str) -> Sample:
        body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        sample, began = Sample(number), time.perf_counter()
        try:
            async with (
                asyncio.timeout(self.timeout),
                http.stream("POST", "/v1/chat/completions", json=body | self.body) as answer,
            ):
                if answer.status_code == 200:
                    sample.error = await _read(answer, sample, began)
                else:
                    sample.error = f"status {answer.status_code}"
        except TimeoutError:
            sample.error = f"no end within {self.timeout:g} s"
        except self._httpx.HTTPError as error:
            sample.error = type(error).__name__
        except (ValueError, LookupError, TypeError, AttributeError):
            sample.error = "no stream of OpenAI's shape"
        finally:
            sample.seconds = time.perf_counter() - began
        return sample


async def _read(answer: Any, sample: Sample, began: float) -> str | None:
    """Fill a sample from a stream; returns why there is no answer, or None."""
    last, is_done, is_counted = began, False, False
    async for event in _events(answer):
        if event is None:
            is_done = True
            continue
        if "error" in event:
            return "an error within the stream"
        if any(choice["delta"].get("content") for choice in event["choices"]):
            now = time.perf_counter()
            if sample.first is None:
                sample.first = now - began
            else:
                sample.gaps.append(now - last)
            last = now
        usage = event.get("usage")
        if usage:
            is_counted = True
            sample.tokens = usage["completion_tokens"]
            sample.speculation = usage.get("speculation")
    if not is_done:
        return "the stream broke off"
    return None if is_counted else "no usage told: tokens are not known"


def messages_of(prompt: Prompt) -> Messages:
    """A prompt as a chat's messages."""
    content = prompt.content
    assert not isinstance(content, tuple), "prompts of a file are texts or messages"
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


async def _events(answer: Any) -> AsyncIterator[dict[str, Any] | None]:
    """Events of a stream; None is its end."""
    async for line in _lines(answer):
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            yield None if data == b"[DONE]" else json.loads(data)


async def _lines(answer: Any) -> AsyncIterator[bytes]:
    """Lines as a stream of events has them: a text may hold what Python, and httpx, would take for a line's end."""
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    yield rest
