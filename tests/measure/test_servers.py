"""Addresses of servers, and what may answer there instead of one: every mistake is a sentence with its remedy."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from outrider.errors import ConfigError
from outrider.measure import servers
from outrider.measure.servers import address, first_model


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("http://x", "http://x"),
        ("http://x:80/", "http://x:80"),
        ("https://x/v1/", "https://x"),
        ("http://x/proxy/v1/chat/completions", "http://x/proxy"),
        ("http://[::1]:8000/v1/models", "http://[::1]:8000"),
    ],
)
def test_an_address_loses_its_route(given, found) -> None:
    assert address(given) == found


@pytest.mark.parametrize(
    "given",
    "|x:8000|localhost|ftp://x|http://|http://[|http://x:99999|http://x:a|http://x?y=1|http://a b|http://x#y|"
    f"http://{'a' * 70}.org|file:///etc/passwd|http://x\n".split("|"),
)
def test_what_is_no_address_is_refused_with_one(given) -> None:
    with pytest.raises(ConfigError, match=r"is no address of a server: give one such as http://127\.0\.0\.1:8000"):
        address(given)


def met(answer, wanted=None, key=None):
    async def run():
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        transport = httpx.MockTransport(lambda request: answer)
        async with httpx.AsyncClient(base_url="http://x", transport=transport, headers=headers) as http:
            return await first_model(http, "http://x", wanted, "--key")

    return asyncio.run(run())


MODELS = json.dumps({"data": [{"id": "a"}, {"id": "b"}]})


def test_the_first_model_unless_one_is_named() -> None:
    assert met(httpx.Response(200, text=MODELS)) == "a"
    assert met(httpx.Response(200, text=MODELS), "b") == "b"
    assert met(httpx.Response(404, text="no such route"), "b") == "b"


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (200, "<html>Welcome</html>", r"/v1/models is no list of models \(status 200\): give the address"),
        (200, "[" * 100_000, "no list of models"),
        (200, '{"data": [{"id": 5}]}', "no list of models"),
        (200, '{"data": [{"id": "\\ud800"}]}', "no list of models"),
        (200, '{"data": null}', "no list of models"),
        (404, MODELS, "no list of models"),
        (200, '{"data": []}', "serves no model: load one"),
        (502, "<html>Bad Gateway</html>", r"is there and fails \(status 502\): see its log"),
        (401, "{}", "wants a key: give it by --key"),
        (200, "x" * (2**22 + 1), "more than 4 MiB"),
    ],
)
def test_what_answers_instead_of_a_server(status, text, said) -> None:
    with pytest.raises(ConfigError, match=said):
        met(httpx.Response(status, text=text))


def test_a_wrong_key_and_another_address_are_told() -> None:
    with pytest.raises(ConfigError, match="refuses this key: give another by --key"):
        met(httpx.Response(403, text="{}"), "b", key="k")
    with pytest.raises(ConfigError, match=r"sends elsewhere \('http://y'\): give the address behind it"):
        met(httpx.Response(301, headers={"Location": "http://y"}))


def test_one_that_is_stuck_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(servers, "PATIENCE", 0.05)

    async def run() -> None:
        async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as stuck:
            url = f"http://127.0.0.1:{stuck.sockets[0].getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=None) as http:
                await first_model(http, url)

    with pytest.raises(ConfigError, match="does not answer within"):
        asyncio.run(run())
