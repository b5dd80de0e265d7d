"""Where an OpenAI-compatible server is and which model it serves; what is in the way is one sentence."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from outrider.errors import ConfigError

EXAMPLE = "http://127.0.0.1:8000"
PAGES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1")
"""Ends of an address that people paste, behind which the server begins."""
PATIENCE = 30.0
"""Seconds in which a server that is up tells its models."""
LOCKED = frozenset((401, 403))


def address(url: str) -> str:
    """A server's address without a route.

    Raises:
        ConfigError: it is none.
    """
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
        parts.port  # noqa: B018 (raises where there can be none)
        parts.hostname and parts.hostname.encode("idna")
    except ValueError:  # unicode's errors are such
        sound = False
    if not sound or any(each.isspace() or not each.isprintable() for each in url):
        raise ConfigError(f"{url!r} is no address of a server: give one such as {EXAMPLE}")
    found = url.rstrip("/")
    return next((found.removesuffix(page) for page in PAGES if found.endswith(page)), found)


async def first_model(http: Any, url: str, wanted: str | None = None, key_option: str = "--api-key-file") -> str:
    """The name of the model that a server serves; the one that is wanted, where it does not tell.

    Args:
        http: an `httpx.AsyncClient` with the address as its base. key_option: by which a key is given.

    Raises:
        ConfigError: nothing answers there, or something else than such a server, or it wants a key.
    """
    import httpx

    try:
        async with asyncio.timeout(PATIENCE), http.stream("GET", "/v1/models") as answer:
            text = await read(answer, 2**22)
    except TimeoutError as error:
        raise ConfigError(f"{url} does not answer within {PATIENCE:.0f} s: see whether it is busy, or stuck") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise ConfigError(f"{url} cannot be reached ({reason(error)}): is the address right, and is it up?") from error
    status = answer.status_code
    if status in LOCKED:
        raise ConfigError(f"{url} {key_wanted(http, key_option)}")
    if wanted is not None:
        return wanted
    if answer.is_redirect:
        raise ConfigError(f"{url} sends elsewhere ({answer.headers['location']!r}): give the address behind it")
    if status >= 500:
        raise ConfigError(f"{url} is there and fails (status {status}): see its log")
    names = [] if status != 200 else _names(text)
    if names is None or status != 200:
        raise ConfigError(
            f"{url}/v1/models is no list of models (status {status}): give the address of an OpenAI-compatible server"
        )
    if not names:
        raise ConfigError(f"{url} serves no model: load one there, or name it here")
    return names[0]


async def read(answer: Any, most: int) -> str:
    """The body of an answer that is being received.

    Raises:
        ValueError: it has more than so many bytes.
    """
    body = bytearray()
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > most:
            raise ValueError(f"its answer has more than {most >> 20} MiB")
    return body.decode("utf-8", "replace")


def reason(error: BaseException) -> str:
    """An error's own words, or its cause's, or what it is called."""
    return str(error) or str(error.__cause__ or "") or type(error).__name__


def key_wanted(http: Any, option: str) -> str:
    """What a server says by status 401 or 403, with the remedy."""
    if "authorization" in http.headers:
        return f"refuses this key: give another by {option}"
    return f"wants a key: give it by {option}"


def _names(text: str) -> list[str] | None:
    """Of the models in a list of OpenAI's shape; None where it is none."""
    try:
        names = [each["id"] for each in json.loads(text)["data"]]
        "".join(names).encode()  # a lone surrogate could not be sent back
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return names
