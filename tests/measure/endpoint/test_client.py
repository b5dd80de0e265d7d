"""Answers of servers as they are met: both routes, bytes, streams, refusals, busy ones and broken ones."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace

import httpx
import pytest

from outrider.errors import ConfigError
from outrider.measure.endpoint import client as module
from outrider.measure.endpoint.answers import Broken, Refused
from outrider.measure.endpoint.client import Ask, Endpoint
from outrider.measure.endpoint.examine import examine
from outrider.measure.endpoint.plan import Plan
from outrider.measure.endpoint.subject import meet
from tests.measure.endpoint.double import Double

ASK = Ask("hello", {"temperature": 0, "logprobs": 2})
SPELLED = {"token": "\ufffd", "logprob": -0.1, "bytes": [226, 128]}
CHAT = {
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"content": "ab"},
            "logprobs": {
                "content": [
                    SPELLED | {"top_logprobs": [SPELLED, {"token": "b", "logprob": -3.0, "bytes": [98]}]},
                    {"token": "<end>", "logprob": -9999.0, "bytes": None, "top_logprobs": []},
                ]
            },
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}
COMPLETION = {
    "choices": [
        {
            "index": 0,
            "finish_reason": "length",
            "text": "ab",
            "logprobs": {
                "tokens": ["a", "b"],
                "token_logprobs": [None, -4.0],
                "top_logprobs": [None, {"c": -0.1, "d": -2.0, "b": -4.0}],
            },
        }
    ]
}


def asked(answers, call, route="chat", **settings):
    """What one call makes of answers given in turns; and the bodies that were sent."""
    bodies, waiting = [], iter(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        bodies.append((request.url.path, json.loads(request.content), dict(request.headers)))
        status, content = next(waiting)
        text = content if isinstance(content, str) else json.dumps(content)
        return httpx.Response(status, text=text)

    async def run():
        endpoint = Endpoint("http://x/v1/", route=route, transport=httpx.MockTransport(answer), **settings)
        try:
            await endpoint.connect()
            return await call(endpoint)
        finally:
            await endpoint.close()

    return asyncio.run(run()), bodies


def test_a_chat_is_read_by_bytes() -> None:
    reply, bodies = asked([(200, CHAT)], lambda endpoint: endpoint.ask(ASK), key="secret")
    (path, body, headers), sample = bodies[0], reply.only
    assert path == "/v1/chat/completions"
    assert (body["model"], body["logprobs"], body["top_logprobs"]) == ("m", True, 2)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert headers["authorization"] == "Bearer secret"
    assert (sample.text, sample.finish, sample.ends) == ("ab", "stop", 1)
    assert sample.tokens == ("\xe2\x80", "<end>")
    assert dict(sample.rows[0].top) == {"\xe2\x80": -0.1, "b": -3.0}
    assert reply.usage == CHAT["usage"]


def test_of_a_completion_what_was_said_is_not_among_the_likeliest() -> None:
    reply, bodies = asked([(200, COMPLETION)], lambda endpoint: endpoint.ask(ASK), "completions")
    assert (bodies[0][0], bodies[0][1]["prompt"], bodies[0][1]["logprobs"]) == ("/v1/completions", "hello", 2)
    first, second = reply.only.rows
    assert math.isnan(first.logprob)
    assert (second.logprob, dict(second.top)) == (-4.0, {"c": -0.1, "d": -2.0})


def stream_of(*events, last="[DONE]"):
    return "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in (*events, last))


def test_a_stream_is_put_together() -> None:
    def piece(index, text, reason=None):
        return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": reason}]}

    events = [piece(1, "x"), piece(0, "a"), piece(0, "b", "stop"), piece(1, "y", "length")]
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}
    reply, bodies = asked([(200, stream_of(*events, usage))], lambda endpoint: endpoint.stream(ASK))
    assert bodies[0][1]["stream_options"] == {"include_usage": True}
    assert [(s.text, s.finish) for s in reply.samples] == [("ab", "stop"), ("xy", "length")]
    assert (reply.chunks, reply.usage) == (4, usage["usage"])


@pytest.mark.parametrize(
    ("status", "content", "error", "said"),
    [
        (400, {"error": {"message": "min_p is unknown"}}, Refused, "min_p is unknown"),
        (422, {"detail": "no such field"}, Refused, "no such field"),
        (404, "nothing here", Refused, "nothing here"),
        (500, "oops", Broken, "status 500: oops"),
        (200, "no json", Broken, "cannot be read"),
        (200, {"choices": [{"text": "a"}]}, Broken, "cannot be read"),
    ],
)
def test_refusals_and_failures_are_told_apart(status, content, error, said) -> None:
    with pytest.raises(error, match=said):
        asked([(status, content)], lambda endpoint: endpoint.ask(ASK))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (stream_of({"choices": []}, last="{}"), "does not end"),
        (stream_of({"error": {"message": "out of memory"}}), "out of memory"),
        (stream_of("{"), "cannot be read"),
    ],
)
def test_streams_that_break_are_told_of(content, said) -> None:
    with pytest.raises(Broken, match=said):
        asked([(200, content)], lambda endpoint: endpoint.stream(ASK))


def test_a_busy_server_is_asked_again(monkeypatch) -> None:
    async def at_once(seconds: float) -> None:
        assert seconds > 0

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": at_once}))
    reply, bodies = asked([(429, ""), (503, ""), (200, CHAT)], lambda endpoint: endpoint.ask(ASK))
    assert (reply.only.text, len(bodies)) == ("ab", 3)
    with pytest.raises(Broken, match="status 429"):
        asked([(429, "")] * module.TRIES, lambda endpoint: endpoint.ask(ASK))


def test_a_server_that_is_not_there_or_takes_nothing_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="is it up"):
        asyncio.run(meet(Endpoint("http://127.0.0.1:9"), ["a"], Plan()))
    with pytest.raises(ConfigError, match="neither chats"):
        asked([(400, "no template"), (404, "no route")], lambda endpoint: meet(endpoint, ["a"], Plan()))


def test_a_server_that_hangs_or_drips_is_silent() -> None:
    """A limit on the whole answer: one that sends a byte now and then would keep any other."""
    models = json.dumps({"data": [{"id": "m"}]})

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
        writer.write(head + (models.encode() if b"models" in line else b" "))
        while b"models" not in line and not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.01)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        endpoint = Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=0.1)
        try:
            await meet(endpoint, ["a"], Plan())
        finally:
            await endpoint.close()
            server.close()

    with pytest.raises(ConfigError, match=r"plainest question \(no answer within 0.1 s\): see .* raise --timeout"):
        asyncio.run(run())


def test_a_locked_server_wants_its_key_by_the_right_option() -> None:
    with pytest.raises(ConfigError, match=r"Bad key\): it wants a key: give it by --reference-key-file"):
        asked(
            [(401, {"error": {"message": "Bad key"}})],
            lambda endpoint: meet(endpoint, ["a"], Plan()),
            key_option="--reference-key-file",
        )


def test_a_failure_gives_the_others_up() -> None:
    answers = [(500, "oops"), *[(200, CHAT)] * 7]
    with pytest.raises(Broken, match="oops") as caught:
        asked(answers, lambda endpoint: endpoint.ask_all([ASK] * 8), at_once=1)
    assert caught.value.remedy == "See the server's log."


def test_nobody_waits_for_a_server_that_died() -> None:
    """Tests that are left are untested, and said to be, once it answers no more."""
    sound, count = httpx.ASGITransport(Double().app), 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        if count > 60:
            raise httpx.ConnectError("refused")
        reply = await sound.handle_async_request(request)
        return httpx.Response(reply.status_code, content=await reply.aread())

    endpoint = Endpoint("http://dying", transport=httpx.MockTransport(answer))
    report = asyncio.run(examine(endpoint, ["aa bb"], Plan(draws=40, max_tokens=10)))
    (broken,) = report.broken
    assert broken.said == "no answer (refused)"
    assert report.findings[-1].said == "http://dying answers no more: no answer (refused)"
    assert {finding.status for finding in report.findings[report.findings.index(broken) + 1 :]} == {"untested"}
    assert count < 80


@pytest.mark.parametrize("wrong", [{"draws": 39}, {"max_tokens": 0}, {"seed": -1}, {"seed": 2**40}, {"tie": math.nan}])
def test_a_plan_that_cannot_be_kept_is_refused(wrong) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.* is out of range: give"):
        Plan(**wrong)
