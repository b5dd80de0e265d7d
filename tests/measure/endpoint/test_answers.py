"""Whatever a server answers is read, or told as no answer; nothing else comes out."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.measure.endpoint.answers import Broken, Row, sentence, streamed, whole
from outrider.measure.endpoint.client import Endpoint
from outrider.measure.endpoint.examine import examine
from outrider.measure.endpoint.plan import Plan
from tests.measure.endpoint.double import Double

ENTRY = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -1.0}]}
CHAT = {
    "choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop", "logprobs": {"content": [ENTRY]}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
WEIRD = [None, True, -1, 1.5, 10**400, "", "\ud800", [], {}, [1], {"a": 1}, math.nan, math.inf, -math.inf, 5000, "-1"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("choices", "index", "usage")), inner),
    max_leaves=8,
)


def places(value, path=()):
    """Paths to everything in a value of JSON."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def with_put(value, path, new):
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = with_put(value[path[0]], path[1:], new)
    return changed


def is_sound(reply) -> bool:
    samples = all(isinstance(s.text, str) and (s.finish is None or isinstance(s.finish, str)) for s in reply.samples)
    rows = [row for sample in reply.samples for row in sample.rows]
    figures = [value for row in rows for value in (row.logprob, *row.top.values())]
    counts = reply.usage is None or all(type(value) is int and value >= 0 for value in reply.usage.values())
    return samples and counts and all(isinstance(row, Row) for row in rows) and all(value <= 1 for value in figures)


def is_read_or_told(read, answer, route) -> bool:
    try:
        return is_sound(read(answer, route, 1))
    except Broken as error:
        return "cannot be read" in str(error) and error.remedy != ""


@pytest.mark.parametrize("path", places(CHAT), ids=str)
def test_any_part_may_be_anything(path) -> None:
    for weird in WEIRD:
        text = json.dumps(with_put(CHAT, path, weird))
        for read in (whole, streamed):
            answer = text if read is whole else f"data: {text}\n\ndata: [DONE]\n\n"
            assert is_read_or_told(read, answer, "chat"), (read, weird)


@given(JSON)
def test_any_json_is_read_or_told(value) -> None:
    for route in ("chat", "completions"):
        assert is_read_or_told(whole, json.dumps(value), route)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("choices",), [], "there is no choice in it"),
        (("choices", 0, "message", "content"), [{"type": "text"}], "the content is no text"),
        (("choices", 0, "index"), 1, "index 1 of a choice is out of range"),
        (("choices", 0, "logprobs", "content", 0, "logprob"), math.nan, "nan is no log-probability"),
        (("choices", 0, "logprobs", "content", 0, "logprob"), 17.5, "17.5 is no log-probability"),
        (("choices", 0, "logprobs", "content", 0, "bytes"), 10**13, "the bytes of a token are none"),
    ],
)
def test_what_is_wrong_is_named(path, value, said) -> None:
    with pytest.raises(Broken, match=said):
        whole(json.dumps(with_put(CHAT, path, value)), "chat", 1)


def test_endless_nesting_is_no_answer() -> None:
    with pytest.raises(Broken, match="nested too deep"):
        whole("[" * 200_000, "chat", None)


@pytest.mark.parametrize("usage", ["lots", [1], {"total_tokens": 0}, {"prompt_tokens": "1", "completion_tokens": 2}])
def test_a_usage_without_counts_is_none(usage) -> None:
    assert whole(json.dumps(CHAT | {"usage": usage}), "chat", None).usage is None


def test_a_refusal_moves_no_terminal() -> None:
    said = sentence(json.dumps({"error": {"message": "no\x1b[31m such\n field \ud800" + "x" * 999}}))
    assert said.startswith("no\ufffd[31m such field \ufffdxxx")
    assert len(said) == 160


@pytest.mark.parametrize("seed", range(3))
def test_a_server_gone_wild_is_reported(seed) -> None:
    """Some of its answers have a part replaced by anything: the check comes to an end, and says so."""
    rng, sound, count = random.Random(seed), httpx.ASGITransport(Double().app), 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        reply = await sound.handle_async_request(request)
        text = (await reply.aread()).decode()
        if count > 40 and rng.random() < 0.1 and text.startswith("{"):
            body = json.loads(text)
            text = json.dumps(with_put(body, rng.choice(list(places(body))), rng.choice(WEIRD)))
        return httpx.Response(reply.status_code, text=text)

    endpoint = Endpoint("http://wild", transport=httpx.MockTransport(answer))
    report = asyncio.run(examine(endpoint, ["aa bb cc", "zz"], Plan(draws=40, draw_tokens=4, max_tokens=10)))
    assert report.broken
    assert all(finding.said and finding.remedy for finding in report.broken)
    assert len(list(report.lines())) > len(report.findings)
