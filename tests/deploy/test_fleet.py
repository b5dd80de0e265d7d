"""What Ray Serve's errors mean to a request, and how servers are asked how they are when one of them hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason='needs "outrider[ray]"')

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, TaskCancelledError  # noqa: E402
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError  # noqa: E402

from outrider.deploy import fleet  # noqa: E402
from outrider.deploy.fleet import Fleet  # noqa: E402
from outrider.deploy.relay import Absent, Ask, Lost, Pin, Taken  # noqa: E402
from outrider.deploy.replica import Report  # noqa: E402


class Response:
    """A handle's response that says what it was given, and then raises; None: it hangs."""

    def __init__(self, said: list[Any], error: BaseException | None = None) -> None:
        self.said = said
        self.error = error
        self.cancelled = False

    def __aiter__(self):
        return self

    async def __anext__(self) -> Any:
        if self.said:
            return self.said.pop(0)
        if self.error is None:
            await asyncio.sleep(60)
        raise self.error

    def __await__(self):
        return self.__anext__().__await__()

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A handle whose calls get the responses that it was given."""

    def __init__(self, *responses: Response, reports: Any = ()) -> None:
        self.responses = list(responses)
        self.all = list(responses)
        self.asked: list[Any] = []
        self.reports = reports

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, asked: Any) -> Response:
        self.asked.append(asked)
        return self.responses.pop(0)

    def broadcast(self, _: str) -> Handle:
        return self

    async def results_async(self, **_: Any) -> list[Any]:
        if isinstance(self.reports, Exception):
            raise self.reports
        return self.reports


async def hear(response: Response, patience: float = 5.0) -> list[Any]:
    heard = []
    async for said in Fleet(Handle(response), patience).ask(Ask({}, b"")):
        heard.append(said)
    return heard


def test_an_answer_is_heard_to_its_end() -> None:
    response = Response([Taken("a"), [{"n": 1}]], StopAsyncIteration())
    assert asyncio.run(hear(response)) == [Taken("a"), [{"n": 1}]]
    assert not response.cancelled


@pytest.mark.parametrize("said", [[], [Taken("a")], [Taken("a"), [{}]]])
@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("no", None), TaskCancelledError()])
def test_a_server_that_is_gone_is_lost(said: list[Any], error: Exception) -> None:
    with pytest.raises(Lost):
        asyncio.run(hear(Response(list(said), error)))


def test_one_that_says_nothing_is_lost() -> None:
    with pytest.raises(Lost):
        asyncio.run(hear(Response([], StopAsyncIteration())))


@pytest.mark.parametrize("error", [BackPressureError(1, 1), DeploymentUnavailableError(None)])
def test_where_none_has_room_the_client_must_wait(error: Exception) -> None:
    with pytest.raises(Absent, match="later"):
        asyncio.run(hear(Response([], error)))


def test_patience_ends_and_the_call_is_taken_back() -> None:
    response = Response([])
    with pytest.raises(Absent, match=r"no server was free for 0\.01 s"):
        asyncio.run(hear(response, patience=0.01))
    assert response.cancelled


def test_a_server_that_fails_is_not_lost() -> None:
    with pytest.raises(RayTaskError):
        asyncio.run(hear(Response([Taken("a")], RayTaskError("answer", "trace", ValueError()))))


def test_one_that_hangs_hides_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "REPORT_SECONDS", 0.05)
    a, b = Report("a", True, 0, b""), Report("b", True, 0, b"")
    handle = Handle(
        Response([]), Response([b]), Response([a]), Response([], ActorDiedError()), reports=[b, a, ActorDiedError()]
    )
    servers = Fleet(handle, 1.0)
    assert asyncio.run(servers.reports()) == [a, b]
    handle.reports = TimeoutError()
    assert asyncio.run(servers.reports()) == [b]
    assert handle.asked == [Pin("a"), Pin("b")]
    assert [response.cancelled for response in handle.all] == [True, False, False, False]
    assert asyncio.run(servers.reports()) == [a]  # it answers again, and the other one has died
    handle.reports = [a]
    assert asyncio.run(servers.reports()) == [a]
