"""A request and its answer between a client and servers that are lost at every point: asked anew, or ended clearly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from outrider.deploy.door import Door
from outrider.deploy.relay import Absent, Answer, Ask, Lost, Taken
from outrider.deploy.replica import Report, answered
from outrider.errors import OutriderError
from outrider.server.settings import ServeConfig

BODY = {"prompt": "x" * 600, "nonce": 7}


async def echo(request: Request) -> JSONResponse:
    body = await request.body()
    told = {name: request.headers.get(name) for name in ("x-request-id", "authorization")}
    return JSONResponse({"body": body.decode(), "client": request.client.host, **told})


async def stream(request: Request) -> StreamingResponse:
    async def events():
        for i in range(4):
            yield f"data: {i}\n\n"
            await asyncio.sleep(0)

    return StreamingResponse(events(), media_type="text/event-stream")


APP = Starlette(
    routes=[Route("/v1/completions", echo, methods=["POST"]), Route("/v1/chat/completions", stream, methods=["POST"])]
)


class Fakes:
    """Servers of which the first few are lost after so many messages; negative: before they say that they have it."""

    def __init__(self, *lost_after: int) -> None:
        self.lost_after = list(lost_after)
        self.asks: list[Ask] = []
        self.closed = 0

    async def ask(self, ask: Ask) -> Answer:
        self.asks.append(ask)
        left = self.lost_after.pop(0) if self.lost_after else 10**9
        if left < 0:
            raise Lost("gone")
        yield Taken(f"server {len(self.asks)}")
        try:
            async for some in answered(APP, ask):
                for message in some:
                    if not left:
                        raise Lost("gone")
                    left -= 1
                    yield [message]
        finally:
            self.closed += 1

    async def reports(self) -> list[Report]:
        return [Report("server 1", True, 3, b"# TYPE a gauge\na 1\n"), Report("server 2", False, 0, b"")]


def door(servers: Any, retries: int = 2, **config: Any) -> Door:
    return Door(servers, ServeConfig(**config), retries)


async def ask_door(made: Door, path: str = "/v1/completions", **given: Any) -> httpx.Response:
    transport = httpx.ASGITransport(made, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as http:
        if "json" in given:
            return await http.post(path, **given)
        return await http.get(path, **given)


def count(made: Door, name: str) -> float:
    return made.figures.registry.get_sample_value(f"outrider_deploy_{name}_total") or 0.0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_comes_through_as_it_is(path: str) -> None:
    servers = Fakes()
    answer = asyncio.run(ask_door(door(servers), path, json=BODY, headers={"X-Request-Id": "r-1"}))
    assert answer.status_code == 200
    assert answer.headers["x-outrider-replica"] == "server 1"
    assert answer.headers.get_list("x-request-id") == ["r-1"]
    assert len(servers.asks[0].digests) == (2 if path == "/v1/completions" else 0)
    if path == "/v1/completions":
        told = answer.json()
        assert json.loads(told["body"]) == BODY
        assert told["x-request-id"] == "r-1"
        assert told["client"] == "127.0.0.1"
    else:
        assert answer.text == "".join(f"data: {i}\n\n" for i in range(4))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("points", [(-1,), (0,), (1,), (1, 0), (-1, 1)])
def test_lost_before_a_byte_was_said_is_asked_anew(path: str, points: tuple[int, ...]) -> None:
    """Also where the head had come, but no piece: the client has seen nothing of it."""
    servers = Fakes(*points)
    made = door(servers)
    answer = asyncio.run(ask_door(made, path, json=BODY))
    assert answer.status_code == 200
    assert answer.headers["x-outrider-replica"] == f"server {len(points) + 1}"
    assert len({dict(ask.scope["headers"])[b"x-request-id"] for ask in servers.asks}) == 1
    assert [len(ask.avoid) for ask in servers.asks] == list(range(len(points) + 1))
    if path == "/v1/chat/completions":
        assert answer.text == "".join(f"data: {i}\n\n" for i in range(4))
    assert count(made, "requests_retried") == len(points)
    assert count(made, "answers_broken") == 0


@pytest.mark.parametrize("after", [2, 3, 4, 5])
def test_lost_in_the_middle_ends_with_a_sentence(after: int) -> None:
    servers = Fakes(after)
    made = door(servers)
    answer = asyncio.run(ask_door(made, "/v1/chat/completions", json=BODY))
    *before, last = answer.text.split("\n\n")[:-1]
    assert before == [f"data: {i}" for i in range(after - 1)]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "replica_lost"
    assert "ask again" in error["message"]
    assert len(servers.asks) == 1, "asked twice, and answered twice"
    assert count(made, "answers_broken") == 1


def test_one_request_cannot_bring_down_servers_without_end() -> None:
    servers = Fakes(0, 0, 0, 0)
    answer = asyncio.run(ask_door(door(servers), json=BODY))
    assert answer.status_code == 503
    assert "3 servers were lost with this request" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    assert len(servers.asks) == 3


def failing(error: Exception) -> Any:
    class Servers(Fakes):
        async def ask(self, ask: Ask) -> Answer:
            self.asks.append(ask)
            raise error
            yield Taken("")

    return Servers()


@pytest.mark.parametrize(
    ("error", "status"), [(Absent("none"), 503), (OutriderError("no: do this"), 500), (ZeroDivisionError(), 500)]
)
def test_what_is_no_loss_is_not_asked_anew(error: Exception, status: int) -> None:
    servers = failing(error)
    assert asyncio.run(ask_door(door(servers), json=BODY)).status_code == status
    assert len(servers.asks) == 1


def test_the_door_keeps_keys_and_bounds(tmp_path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    servers = Fakes()
    made = door(servers, api_key_file=str(tmp_path / "keys"), max_body=1000)
    key = {"Authorization": "Bearer secret"}
    assert asyncio.run(ask_door(made, json=BODY)).status_code == 401
    assert asyncio.run(ask_door(made, "/metrics")).status_code == 401
    assert asyncio.run(ask_door(made, json={"prompt": "y" * 2000}, headers=key)).status_code == 413
    assert not servers.asks
    assert asyncio.run(ask_door(made, json=BODY, headers=key)).json()["authorization"] == "Bearer secret"
    assert asyncio.run(ask_door(made, "/health")).status_code == 200


def test_health_and_figures() -> None:
    made = door(Fakes())
    health = asyncio.run(ask_door(made, "/health"))
    assert [one["status"] for one in health.json()["replicas"]] == ["ok", "ended"]
    assert asyncio.run(ask_door(made, "/ready")).json() == {"status": "ready", "open": 3}
    asyncio.run(ask_door(made, json=BODY))
    text = asyncio.run(ask_door(made, "/metrics")).text
    assert 'a{replica="server 1"} 1.0' in text
    assert 'outrider_deploy_http_requests_total{route="/v1/completions",status="200"} 1.0' in text
    assert "outrider_deploy_replicas 2.0" in text
    assert 'a{replica="server 1"} 1.0' in asyncio.run(ask_door(made, "/metrics/replicas")).text


def test_whoever_leaves_is_left_alone() -> None:
    """The server hears of it, and nothing is asked anew."""

    async def leave(after: Callable[[], bool], servers: Fakes) -> list[Any]:
        sent: list[Any] = []
        bodies = [{"type": "http.request", "body": b"{}"}]

        async def receive():
            if bodies:
                return bodies.pop()
            while not after():
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "client": ("::1", 1)}
        await asyncio.wait_for(door(servers)(scope, receive, send), 5)
        return sent

    class Slow(Fakes):
        async def ask(self, ask: Ask) -> Answer:
            self.asks.append(ask)
            yield Taken("server 1")
            try:
                yield [{"type": "http.response.start", "status": 200, "headers": []}]
                await asyncio.sleep(60)
            finally:
                self.closed += 1

    servers = Slow()
    assert asyncio.run(leave(lambda: len(servers.asks) == 1, servers)) == []
    assert servers.closed == len(servers.asks) == 1


def test_a_server_hears_of_whoever_leaves_and_a_broken_answer_is_not_whole() -> None:
    heard: list[str] = []

    async def app(scope, receive, send) -> None:
        heard.append((await receive())["type"])
        if scope["path"] == "/fails":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise ValueError("in the middle")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        heard.append((await receive())["type"])

    async def one(path: str) -> list[Any]:
        answer = answered(app, Ask({"path": path, "method": "GET", "headers": []}, b""))
        if path == "/fails":
            return [message async for some in answer for message in some]
        first = await anext(answer)
        await answer.aclose()
        return first

    assert len(asyncio.run(one("/waits"))) == 1
    assert heard == ["http.request", "http.disconnect"]
    assert len(asyncio.run(one("/fails"))) == 1
