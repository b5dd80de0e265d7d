"""What `/openapi.json` says of answers: their fields, and every status with which something may be refused."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

Json = dict[str, Any]
Answers = dict[int | str, Json]

REASONS = MappingProxyType(
    {
        400: "Refused: a field is unknown, wrong, or cannot be honoured exactly.",
        401: "No known API key.",
        404: "Another model than the one here.",
        408: "The body did not come.",
        413: "The body is too large.",
        429: "The queue is full; Retry-After says when to try again.",
        500: "The model gave no law, or the server failed.",
        503: "The server is stopping, or out of memory.",
        504: "Not done in time.",
    }
)


def refusals(*statuses: int) -> Answers:
    """These, or all that there are: each is one sentence in OpenAI's shape."""
    error = _object(message=_text(), type=_text(), param=_or_null(_text()), code=_or_null(_text()))
    return {status: _said(REASONS[status], _object(error=error)) for status in statuses or REASONS}


def completion() -> Answers:
    """Of `/v1/completions`."""
    return _answer("text_completion", text=_text())


def chat() -> Answers:
    """Of `/v1/chat/completions`."""
    return _answer("chat.completion", message=_object(role={"const": "assistant"}, content=_or_null(_text())))


def models() -> Answers:
    """Of `/v1/models`."""
    whole = _object(object={"const": "list"}, data=_list(_card()))
    return {200: _said("What is served.", whole)} | refusals(401)


def model() -> Answers:
    """Of `/v1/models/{name}`."""
    return {200: _said("What is served.", _card())} | refusals(401, 404)


def tokens() -> Answers:
    """Of `/tokenize`."""
    whole = _object(tokens=_list(_count()), count=_count(), max_model_len=_count())
    return {200: _said("Token ids.", whole)} | refusals()


def prompt() -> Answers:
    """Of `/detokenize`."""
    return {200: _said("Their text.", _object(prompt=_text()))} | refusals()


def health() -> Answers:
    """Of `/health`."""
    return {200: _said("The engine's thread lives.", _object(status={"const": "ok"}))} | refusals(503)


def ready() -> Answers:
    """Of `/ready`."""
    return {200: _said("Requests are taken.", _object(status={"const": "ready"}, open=_count()))} | refusals(503)


def _answer(kind: str, **choice: Json) -> Answers:
    """A completion or a chat, as a whole or as events, or why there is none."""
    counts = {name: _count() for name in ("cycles", "drafted", "accepted")}
    speed_up = _or_null(_object(ratio=_number(), low=_number(), high=_number()))
    drafted = _object(drafter=_text(), accepted_by_position=_list(_count()), speed_up=speed_up, **counts)
    totals = {name: _count() for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    whole = _object(
        id=_text(),
        object={"const": kind},
        created=_count(),
        model=_text(),
        system_fingerprint=_text(),
        seed=_count(),
        exactness={"enum": ["seed", "distribution"]},
        choices=_list(_object(index=_count(), finish_reason={"enum": ["stop", "length", "tool_calls"]}, **choice)),
        usage=_object(speculation=drafted, **totals),
    )
    said = _said("The whole answer, or with `stream` its events, each a JSON object behind `data: `.", whole)
    said["content"]["text/event-stream"] = {"schema": _text()}
    return {200: said} | refusals()


def _card() -> Json:
    texts = {name: _text() for name in ("id", "owned_by", "exactness", "drafter")}
    return _object(object={"const": "model"}, max_model_len=_count(), **texts)


def _text() -> Json:
    return {"type": "string"}


def _count() -> Json:
    return {"type": "integer", "minimum": 0}


def _number() -> Json:
    return {"type": "number", "minimum": 0}


def _object(**fields: Json) -> Json:
    """All of these fields, and perhaps more."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _said(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
