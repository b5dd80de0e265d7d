"""A client of any OpenAI-compatible server: chats and completions read into one shape, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from outrider.errors import ConfigError, OutriderError
from outrider.measure.prompts import Messages

Json: TypeAlias = dict[str, Any]
Route = Literal["chat", "completions"]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
REFUSALS = frozenset((400, 404, 405, 413, 422, 501))
"""Statuses by which a server says that it will not do what was asked."""
BUSY = frozenset((429, 503))
TRIES = 6
"""Of a request that a busy server turned away."""
LEAST_LOGPROB = -9000.0
"""Servers write about -9999 where JSON cannot say minus infinity."""


class Refused(OutriderError):
    """The server will not do this; its own words."""


class Broken(OutriderError):
    """The server failed at what was asked, or answered what is no answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """One token as the server tells of it.

    Attributes:
        token: its text, or its bytes where the server tells them; only ever compared. logprob: its own.
        top: log-probabilities of the likeliest tokens there, -inf ones left out.
    """

    token: str
    logprob: float
    top: Mapping[str, float]


@dataclass(slots=True)
class Sample:
    """One choice. `rows` is empty where no log-probabilities were told."""

    text: str = ""
    rows: list[Row] = field(default_factory=list)
    finish: str | None = None
    ends: int = 0
    """How often a finish reason was told: once, in a sound answer."""

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(row.token for row in self.rows)


@dataclass(slots=True)
class Reply:
    """An answer; `chunks`: how many events of a stream held text."""

    samples: list[Sample]
    usage: Json | None
    chunks: int = 0

    @property
    def only(self) -> Sample:
        return self.samples[0]


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
        route: which of the two it is asked by. at_once: requests in flight. transport: httpx's, for tests.

    Raises:
        ConfigError: httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        key: str | None = None,
        route: Route = "chat",
        at_once: int = 8,
        transport: Any = None,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError('check --endpoint needs httpx: install "outrider[serve]"') from error
        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model, self.route, self.num_asked = model, route, 0
        self._at_once = asyncio.Semaphore(at_once)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=600, transport=transport)

    async def close(self) -> None:
        await self._http.aclose()

    async def connect(self) -> None:
        """Find the model's name.

        Raises:
            ConfigError: nothing answers there, or it serves no model.
        """
        try:
            answer = await self._http.get("/v1/models")
            self.model = self.model or str(answer.json()["data"][0]["id"])
        except (*self._errors, ValueError, LookupError, TypeError) as error:
            if self.model is not None and not isinstance(error, self._errors):
                return
            raise ConfigError(f"{self.url} serves no model ({error or type(error).__name__}): is it up?") from error

    async def ask(self, ask: Ask, route: Route | None = None) -> Reply:
        """The answer to one question, whole.

        Raises:
            Refused, Broken: there is none.
        """
        route = route or self.route
        answer = await self._post(PATHS[route], self._body(ask, route))
        try:
            body = json.loads(answer)
            samples = [Sample() for _ in body["choices"]]
            for choice in body["choices"]:
                _add(samples[choice["index"]], choice, route, ask.fields.get("logprobs"))
            return Reply(samples, body.get("usage"))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Broken(f"an answer that cannot be read ({error!r}): {answer[:200]}") from error

    async def stream(self, ask: Ask) -> Reply:
        """The same as a stream, put together.

        Raises:
            Refused, Broken: there is none.
        """
        more = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await self._post(PATHS[self.route], self._body(ask, self.route) | more)
        lines = [line[5:].strip() for line in answer.splitlines() if line.startswith("data:")]
        if not lines or lines[-1] != "[DONE]":
            raise Broken("a stream that does not end in [DONE]")
        samples: dict[int, Sample] = {}
        reply = Reply([], None)
        try:
            for event in map(json.loads, lines[:-1]):
                if "error" in event:
                    raise Broken(f"an error within a stream: {event['error']}")
                for choice in event["choices"]:
                    sample = samples.setdefault(choice["index"], Sample())
                    length = len(sample.text)
                    _add(sample, choice, self.route, ask.fields.get("logprobs"))
                    reply.chunks += len(sample.text) > length
                reply.usage = event.get("usage") or reply.usage
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Broken(f"a stream that cannot be read ({error!r})") from error
        reply.samples = [samples[index] for index in sorted(samples)]
        return reply

    async def ask_all(self, asks: Sequence[Ask], route: Route | None = None) -> list[Reply]:
        """The answers to many questions, several in flight."""
        return list(await asyncio.gather(*(self.ask(ask, route) for ask in asks)))

    async def stream_all(self, asks: Sequence[Ask]) -> list[Reply]:
        return list(await asyncio.gather(*map(self.stream, asks)))

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
        for wait in range(TRIES):
            self.num_asked += 1
            try:
                async with self._at_once:
                    answer = await self._http.post(path, json=body)
            except self._errors as error:
                raise Broken(f"no answer ({error or type(error).__name__})") from error
            if answer.status_code not in BUSY:
                break
            await asyncio.sleep(0.5 * 2**wait)
        if answer.status_code in REFUSALS:
            raise Refused(_sentence(answer.text))
        if answer.status_code != 200:
            raise Broken(f"status {answer.status_code}: {_sentence(answer.text)}")
        return str(answer.text)


def _sentence(body: str) -> str:
    """What a server said, out of whichever shape it chose."""
    try:
        told = json.loads(body)
        told = told.get("error", told)
        told = told.get("message", told) if isinstance(told, dict) else told
    except (ValueError, AttributeError):
        told = body
    return " ".join(str(told).split())[:200] or "no reason given"


def _add(sample: Sample, choice: Json, route: Route, num_top: int | None) -> None:
    """Add a choice, or a chunk of one, to a sample."""
    if route == "completions":
        text = choice.get("text")
    else:
        text = (choice.get("message") or choice.get("delta") or {}).get("content")
    sample.text += text or ""
    if choice.get("finish_reason"):
        sample.finish = choice["finish_reason"]
        sample.ends += 1
    told = choice.get("logprobs")
    if told and num_top is not None:
        sample.rows += _chat_rows(told, num_top) if "content" in told else _completion_rows(told, num_top)


def _chat_rows(told: Json, num_top: int) -> list[Row]:
    rows = []
    for entry in told["content"] or ():
        rows.append(Row(_name(entry), entry["logprob"], _likeliest(entry.get("top_logprobs") or (), num_top)))
    return rows


def _completion_rows(told: Json, num_top: int) -> list[Row]:
    tops = told.get("top_logprobs") or [{}] * len(told["tokens"])
    rows = []
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], tops, strict=True):
        # An echoed prompt's first token has none; what was said is told beside the likeliest.
        pairs = [{"token": name, "logprob": value} for name, value in (top or {}).items()]
        rows.append(Row(token, math.nan if logprob is None else logprob, _likeliest(pairs, num_top)))
    return rows


def _likeliest(entries: Sequence[Json], num_top: int) -> dict[str, float]:
    """Tokens of one spelling are one; beyond the likeliest nothing is kept."""
    found: dict[str, float] = {}
    for entry in sorted(entries, key=lambda entry: -entry["logprob"])[:num_top]:
        name, logprob = _name(entry), entry["logprob"]
        if logprob > LEAST_LOGPROB:
            found[name] = float(math.log(math.exp(found[name]) + math.exp(logprob))) if name in found else logprob
    return found


def _name(entry: Json) -> str:
    """The bytes tell apart what looks alike; a special token may have none."""
    spelled = entry.get("bytes")
    return bytes(spelled).decode("latin-1") if spelled else str(entry["token"])
