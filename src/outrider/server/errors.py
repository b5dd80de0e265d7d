"""What goes wrong over HTTP, in OpenAI's shape: one sentence, and nothing of our inside."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from outrider.errors import CapacityError, NumericsError, OutriderError, RequestError
from outrider.registry import nearest
from outrider.request import SamplingParams

LONGEST = 500
"""Characters of a refusal: what a client sent comes back in it no longer than this."""
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is a refusal.

    Args:
        status: of HTTP. message: one sentence with its remedy. param: the field meant. code: a word for programs.
        retry_after: seconds after which it may be tried again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shortened(message)
        self.param = None if param is None else shortened(param)
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """What the answer's headers say of it."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | {"WWW-Authenticate": "Bearer"} if self.status == 401 else found


def shortened(text: str) -> str:
    """One line of bounded length, its end, where the remedy stands, included."""
    line = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return " ".join(line.split()) if "\n" in line else line


def of_error(error: Exception) -> ApiError:
    """The answer to an error; of one that no rule speaks of, nothing is told but that it happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        named = re.match(r"(\w+)[ =]", str(error))  # "top_p=2 is out of range: ..."
        field = named[1] if named and named[1] in {f.name for f in fields(SamplingParams)} else None
        return ApiError(400, str(error), param=field)
    if isinstance(error, CapacityError):
        return ApiError(503, str(error), code="out_of_memory")
    if isinstance(error, NumericsError):
        return ApiError(500, str(error), code="numerics")
    if isinstance(error, OutriderError):
        return ApiError(500, str(error))
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def of_validation(problems: list[dict[str, Any]], known: list[str]) -> ApiError:
    """The answer to a body that is not of its form, from pydantic's list of problems.

    Args:
        known: names of the fields that there are.
    """
    # Of a union each form complains; one that has no quarrel with the type, and the deepest, was meant.
    problem = max(
        problems, key=lambda p: (p["type"] == "extra_forbidden", not p["type"].endswith("_type"), len(p["loc"]))
    )
    path = [str(part) for part in problem["loc"] if part != "body" and not _is_form(str(part))]
    name = ".".join(path) or None
    if problem["type"] == "extra_forbidden":
        near = f": {nearest(path[-1][:LONGEST], known)}" if len(path) == 1 else ": leave it out"
        return ApiError(400, f"field {name!r} is not supported{near}", param=name, code="unsupported_field")
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON ({problem.get('ctx', {}).get('error', 'it breaks off')}): mend it")
    if not path and problem["type"] in ("missing", "model_attributes_type"):
        return ApiError(400, "the body is no JSON object: send one, with Content-Type: application/json")
    if problem["type"] == "missing":
        return ApiError(400, f"field {name!r} is missing: add it", param=name, code="missing_field")
    said = str(problem["msg"]).removeprefix("Value error, ")
    subject = f"field {name!r}" if name else "the body"
    return ApiError(400, f"{subject} is wrong: {said[:1].lower()}{said[1:]}", param=name, code="invalid_value")


def _is_form(part: str) -> bool:
    """Whether a part of a problem's place names one form of several that a value may have, and no field."""
    return part in ("str", "int", "constrained-str") or "[" in part
