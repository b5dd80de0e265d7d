"""A client of any OpenAI-compatible server: questions in one shape, answered whole or as a stream, in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider.errors import ConfigError
from outrider.measure.endpoint.answers import Broken, Json, Refused, Reply, Route, sentence, streamed, whole
from outrider.measure.prompts import Messages
from outrider.measure.servers import LOCKED, address, first_model, key_wanted, read, reason

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
REFUSALS = frozenset((400, 404, 405, 413, 422, 501))
"""Statuses by which a server says that it will not do what was asked."""
BUSY = frozenset((429, 503))
TRIES = 6
"""Of a request that a busy server turned away."""
MOST_BYTES = 2**26
"""Of an answer: more is no answer to what is asked here."""

T = TypeVar("T")


class Silent(Broken):
    """The server did not answer at all."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One question: a prompt, and fields of the body in completions' spelling (`logprobs` a number)."""

    prompt: str | Messages
    fields: Json

    def but(self, **fields: Any) -> Ask:
        return Ask(self.prompt, self.fields | fields)


class Endpoint:
    """One server.

    Args:
        url: with or without `/v1`. model: its name there; None takes the first. key: None without one.
        route: which of the two it is asked by. at_once: requests in flight. timeout: seconds that an answer may take.
        key_option: by which a person gives the key. transport: httpx's, for tests.

    Raises:
        ConfigError: httpx is not installed, or the address is none.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        key: str | None = None,
        route: Route = "chat",
        at_once: int = 8,
        timeout: float = 120.0,
        key_option: str = "--api-key-file",
        transport: Any = None,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError('check --endpoint needs httpx: install "outrider[serve]"') from error
        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        self.url = address(url)
        self.model, self.route, self.num_asked = model, route, 0
        self._at_once, self._timeout, self._key_option = asyncio.Semaphore(at_once), timeout, key_option
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=None,  # a server that drips keeps any but a limit on the whole
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def connect(self) -> None:
        """Find the model's name.

        Raises:
            ConfigError: nothing answers there, or it serves no model.
        """
        self.model = await first_model(self._http, self.url, self.model, self._key_option)

    async def ask(self, ask: Ask, route: Route | None = None) -> Reply:
        """The answer to one question, whole.

        Raises:
            Refused, Broken: there is none.
        """
        route = route or self.route
        return whole(await self._post(PATHS[route], self._body(ask, route)), route, ask.fields.get("logprobs"))

    async def stream(self, ask: Ask) -> Reply:
        """The same as a stream, put together.

        Raises:
            Refused, Broken: there is none.
        """
        more = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await self._post(PATHS[self.route], self._body(ask, self.route) | more)
        return streamed(answer, self.route, ask.fields.get("logprobs"))

    async def ask_all(self, asks: Sequence[Ask], route: Route | None = None) -> list[Reply]:
        """The answers to many questions, several in flight."""
        return await _together(self.ask(ask, route) for ask in asks)

    async def stream_all(self, asks: Sequence[Ask]) -> list[Reply]:
        return await _together(self.stream(ask) for ask in asks)

    def _body(self, ask: Ask, route: Route) -> Json:
        body: Json = {"model": self.model, **ask.fields}
        if route == "completions":
            assert isinstance(ask.prompt, str), "completions take texts"
            return body | {"prompt": ask.prompt}
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": ask.fields["logprobs"]}
        messages = ask.prompt if isinstance(ask.prompt, list) else [{"role": "user", "content": ask.prompt}]
        return body | {"messages": messages}

    async def _post(self, path: str, body: Json) -> str:
        for tried in range(1, TRIES + 1):
            status, text = await self._answer(path, body)
            if status not in BUSY or tried == TRIES:
                break
            await asyncio.sleep(0.25 * 2**tried)
        if status in REFUSALS:
            raise Refused(sentence(text))
        if status in LOCKED:
            raise Broken(f"status {status}: {sentence(text)}", f"It {key_wanted(self._http, self._key_option)}.")
        if status in BUSY:
            raise Broken(f"status {status}: {sentence(text)}", "The server is busy: ask less --at-once, or later.")
        if status != 200:
            raise Broken(f"status {status}: {sentence(text)}")
        return text

    async def _answer(self, path: str, body: Json) -> tuple[int, str]:
        async with self._at_once:
            self.num_asked += 1
            try:
                async with asyncio.timeout(self._timeout), self._http.stream("POST", path, json=body) as answer:
                    return answer.status_code, await read(answer, MOST_BYTES)
            except TimeoutError as error:
                remedy = "See whether the server is stuck, or raise --timeout where it is slow."
                raise Silent(f"no answer within {self._timeout:g} s", remedy) from error
            except self._errors as error:
                raise Silent(f"no answer ({reason(error)})") from error
            except ValueError as error:
                raise Broken(str(error)) from error


async def _together(asks: Iterable[Awaitable[T]]) -> list[T]:
    """All of them; where one fails, the others are given up."""
    tasks = [asyncio.ensure_future(ask) for ask in asks]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
