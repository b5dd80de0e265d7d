"""What a server answered, read into one shape; what is no answer is told as such, whatever it is instead."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from outrider.errors import OutriderError

Json: TypeAlias = dict[str, Any]
Route = Literal["chat", "completions"]
LEAST_LOGPROB = -9000.0
"""Servers write about -9999 where JSON cannot say minus infinity."""
MOST_LOGPROB = 1.0
"""Above 0 it is wrong, and a test says so; above this it is none, but a logit perhaps."""
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
SHOWN = 160
"""Characters of what a server said that are shown."""


class Refused(OutriderError):
    """The server will not do this; its own words."""


class Broken(OutriderError):
    """The server failed at what was asked, or answered what is no answer; `remedy`: what to do."""

    def __init__(self, said: str, remedy: str = "See the server's log.") -> None:
        super().__init__(said)
        self.remedy = remedy


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
    """An answer; `usage`: counts of tokens, None where not both are told; `chunks`: events of a stream with text."""

    samples: list[Sample]
    usage: dict[str, int] | None
    chunks: int = 0

    @property
    def only(self) -> Sample:
        return self.samples[0]


def whole(answer: str, route: Route, num_top: int | None) -> Reply:
    """The body of an answer; at least one sample. `num_top`: likeliest tokens that were asked for.

    Raises:
        Broken: it is none.
    """
    try:
        body = _object(loads(answer), "the body")
        choices = _list(body.get("choices"), "choices")
        if not choices:
            raise ValueError("there is no choice in it")
        samples = [Sample() for _ in choices]
        for choice in choices:
            _add(samples[_index(choice, len(samples))], choice, route, num_top)
        return Reply(samples, _usage(body.get("usage")))
    except ValueError as error:
        raise Broken(f"an answer that cannot be read ({error}): {shown(answer)}") from error


def streamed(answer: str, route: Route, num_top: int | None) -> Reply:
    """The events of a stream, put together; perhaps without a sample.

    Raises:
        Broken: they are none, or tell of an error.
    """
    lines = [line[5:].strip() for line in answer.split("\n") if line.startswith("data:")]
    if not lines or lines[-1] != "[DONE]":
        raise Broken("a stream that does not end in [DONE]")
    samples: dict[int, Sample] = {}
    reply = Reply([], None)
    try:
        for line in lines[:-1]:
            event = _object(loads(line), "an event")
            if "error" in event:
                raise Broken(f"an error within a stream: {sentence(line)}")
            for choice in _list(event.get("choices"), "choices"):
                sample = samples.setdefault(_index(choice), Sample())
                length = len(sample.text)
                _add(sample, choice, route, num_top)
                reply.chunks += len(sample.text) > length
            reply.usage = _usage(event.get("usage")) or reply.usage
    except ValueError as error:
        raise Broken(f"a stream that cannot be read ({error})") from error
    reply.samples = [samples[index] for index in sorted(samples)]
    return reply


def loads(text: str) -> Any:
    """JSON.

    Raises:
        ValueError: it is none, or is nested without end.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError("it is no JSON") from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def sentence(body: str) -> str:
    """What a server said of a refusal, out of whichever shape it chose."""
    try:
        told = loads(body)
        told = told.get("error", told)
        told = told.get("message", told) if isinstance(told, dict) else told
    except (ValueError, AttributeError):
        told = body
    return shown(str(told)) or "no reason given"


def shown(text: str) -> str:
    """A server's words, as a terminal may be given them."""
    words = " ".join(text[: 10 * SHOWN].split())
    return "".join(each if each.isprintable() else "\ufffd" for each in words)[:SHOWN]


def _add(sample: Sample, choice: Json, route: Route, num_top: int | None) -> None:
    """Add a choice, or a chunk of one, to a sample."""
    if route == "completions":
        text = choice.get("text")
    else:
        text = _object(choice.get("message") or choice.get("delta") or {}, "a message").get("content")
    sample.text += _text(text or "", "the content")
    if choice.get("finish_reason"):
        sample.finish = _text(choice["finish_reason"], "finish_reason")
        sample.ends += 1
    told = choice.get("logprobs")
    if told and num_top is not None:
        told = _object(told, "logprobs")
        sample.rows += _chat_rows(told, num_top) if "content" in told else _completion_rows(told, num_top)


def _chat_rows(told: Json, num_top: int) -> Iterator[Row]:
    for entry in _list(told["content"] or [], "the content of logprobs"):
        entry = _object(entry, "an entry of logprobs")
        top = _list(entry.get("top_logprobs") or [], "top_logprobs")
        pairs = [(_name(each), _logprob(each.get("logprob"))) for each in (_object(e, "top_logprobs") for e in top)]
        yield Row(_name(entry), _logprob(entry.get("logprob")), _likeliest(pairs, num_top))


def _completion_rows(told: Json, num_top: int) -> Iterator[Row]:
    tokens, logprobs = (_list(told.get(name), name) for name in ("tokens", "token_logprobs"))
    tops = _list(told.get("top_logprobs") or [{}] * len(tokens), "top_logprobs")
    for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
        pairs = [(name, _logprob(value)) for name, value in _object(top or {}, "top_logprobs").items()]
        # An echoed prompt's first token has none; what was said is told beside the likeliest.
        own = math.nan if logprob is None else _logprob(logprob)
        yield Row(_text(token, "a token"), own, _likeliest(pairs, num_top))


def _likeliest(pairs: Iterable[tuple[str, float]], num_top: int) -> dict[str, float]:
    """Tokens of one spelling are one; beyond the likeliest nothing is kept."""
    found: dict[str, float] = {}
    for name, logprob in sorted(pairs, key=lambda pair: -pair[1])[:num_top]:
        if logprob > LEAST_LOGPROB:
            found[name] = float(math.log(math.exp(found[name]) + math.exp(logprob))) if name in found else logprob
    return found


def _name(entry: Json) -> str:
    """The bytes tell apart what looks alike; a special token may have none."""
    spelled = entry.get("bytes")
    if not spelled:
        return _text(entry.get("token"), "a token")
    if not isinstance(spelled, list) or not all(_is_whole(each) and each < 256 for each in spelled):
        raise ValueError("the bytes of a token are none")
    return bytes(spelled).decode("latin-1")


def _logprob(value: Any) -> float:
    """A number of at most 0, or nearly; minus infinity is one."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value <= MOST_LOGPROB:
        raise ValueError(f"{shown(repr(value))[:40]} is no log-probability")
    return float(value) if value > -1e9 else -math.inf  # a whole number may be too long for a float


def _usage(told: Any) -> dict[str, int] | None:
    if not isinstance(told, dict):
        return None
    counts = {name: told[name] for name in COUNTS if _is_whole(told.get(name))}
    return counts if counts.keys() >= set(COUNTS[:2]) else None


def _index(choice: Any, count: int | None = None) -> int:
    index: Any = _object(choice, "a choice").get("index")
    if not _is_whole(index) or (count is not None and index >= count):
        raise ValueError(f"index {shown(repr(index))[:40]} of a choice is out of range")
    return int(index)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _object(value: Any, what: str) -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no object")
    return value


def _list(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is no list")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is no text")
    return value
