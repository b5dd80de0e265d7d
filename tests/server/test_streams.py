"""Streams over HTTP: UTF-8 and stop strings across bursts, usage, traces, and pacing."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.measure import load
from outrider.request import TokenLogprob
from outrider.server.job import Piece
from outrider.server.pacing import split
from outrider.server.stream import EventStream
from outrider.server.tokens import Offsets, TokenNames
from tests.server.test_same_text import of_stream

PROMPT = "abc the é abc the é"


@pytest.fixture(scope="module")
def greedy(served):
    """A long greedy text: it loops, so that most of it comes in bursts."""
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    (result,) = served.llm.generate(PROMPT, params, raw=True)
    assert result.tally.tau > 1.3
    return result


def stream(events, http, **more):
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 150, "ignore_eos": True, "stream": True, **more}
    return list(events(http, "/v1/completions", asked))


@pytest.mark.parametrize("smooth", [False, True])
def test_characters_are_whole_and_all_there(served, events, greedy, smooth) -> None:
    with served.http() as http:
        found = stream(events, http, stream_smoothing=smooth)
    assert of_stream(found)[0] == (greedy.text, "length")
    if smooth:
        assert len(found) > greedy.tally.cycles


def test_every_stop_string_of_a_text_wherever_a_burst_ends(served, events, greedy) -> None:
    """Faults 21 and 22: strings that begin and end at any place of a burst."""
    text = greedy.text
    with served.http() as http:
        for start in range(3, len(text) - 6, 9):
            stop = text[start : start + 1 + start % 5]
            want = text[: text.index(stop)]
            found = stream(events, http, stop=[stop, "never said"], logprobs=0, stream_options={"include_usage": True})
            usage = found.pop()["usage"]
            assert of_stream(found)[0] == (want, "stop")
            rows = [lp for e in found for c in e["choices"] for lp in (c["logprobs"] or {}).get("token_logprobs", [])]
            assert len(rows) == usage["completion_tokens"]
            whole = http.post(
                "/v1/completions",
                json={"prompt": PROMPT, "temperature": 0, "max_tokens": 150, "ignore_eos": True, "stop": stop},
            ).json()
            assert whole["choices"][0]["text"] == want
            assert whole["usage"]["completion_tokens"] == usage["completion_tokens"]


def test_usage_comes_last_and_only_where_wanted(served, client) -> None:
    call = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "n": 2, "seed": 1}
    whole = client.completions.create(**call)
    chunks = list(client.completions.create(**call, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    # What was guessed, and the speed, may differ from run to run: prices are measured.
    told, expected = (usage.model_dump(exclude={"speculation"}) for usage in (chunks[-1].usage, whole.usage))
    assert told == expected
    assert all(chunk.usage is None for chunk in client.completions.create(**call, stream=True))


def test_a_trace_tells_every_node_and_adds_up(served, events, greedy) -> None:
    """Fault 37: verdicts, counts and tokens of the cycles are those of the text and of the usage."""
    with served.http() as http:
        found = stream(events, http, speculation={"trace": True}, stream_options={"include_usage": True})
        asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 150, "ignore_eos": True}
        whole = http.post("/v1/completions", json={**asked, "speculation": {"trace": True}}).json()
    usage = found.pop()["usage"]["speculation"]
    cycles = [event["speculation"] for event in found if "speculation" in event]
    assert [t["id"] for cycle in cycles for t in cycle["tokens"]] == list(greedy.token_ids)
    assert sum(len(cycle["nodes"]) for cycle in cycles) == usage["drafted"]
    accepted = 0
    for cycle in cycles:
        said = [node["verdict"] for node in cycle["nodes"]]
        assert set(said) <= {"accepted", "rejected", "unreached"}
        assert cycle["drawn"]["p"] == 1.0  # greedy: all of the law lies on one token
        for node in cycle["nodes"]:
            assert node["q"] is None  # a lookup names no law
            assert node["p"] == (1.0 if node["verdict"] == "accepted" else node["p"])
            assert node["depth"] == (1 if node["parent"] < 0 else cycle["nodes"][node["parent"]]["depth"] + 1)
        assert set(cycle["seconds"]) == {"draft", "verify", "sample", "total"}
        accepted += cycle["accepted"]
        assert said.count("accepted") >= cycle["accepted"]  # an end may cut
    assert accepted == usage["accepted"] > 0
    traced = whole["usage"]["speculation"]["trace"]  # of another run, which may have guessed elsewhere
    assert [t["id"] for cycle in traced for t in cycle["tokens"]] == list(greedy.token_ids)
    assert sum(len(cycle["nodes"]) for cycle in traced) == whole["usage"]["speculation"]["drafted"]
    assert sum(cycle["accepted"] for cycle in traced) == whole["usage"]["speculation"]["accepted"]
    assert set(traced[0]) == set(cycles[0])


def test_p_is_the_law_that_is_drawn_from(served, client) -> None:
    """Against log-probabilities of the warped law, which are computed elsewhere."""
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        temperature=0.8,
        seed=5,
        max_tokens=40,
        logprobs=0,
        extra_body={"logprobs_mode": "warped", "top_k": 20, "speculation": {"trace": True}},
    )
    drawn = [cycle["drawn"]["p"] for cycle in answer.usage.speculation["trace"]]
    places = [len(cycle["tokens"]) for cycle in answer.usage.speculation["trace"]]
    told = answer.choices[0].logprobs.token_logprobs
    end = 0
    for p, count in zip(drawn, places, strict=True):
        end += count
        assert math.exp(told[end - 1]) == pytest.approx(p, rel=1e-6)


NAMES = TokenNames(lambda token: [b"a", "é".encode()[:1], "é".encode()[1:], b" the", "日本".encode()][token])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(0, 7), st.booleans())
def test_a_split_burst_is_the_same_burst(tokens, accepted, cut) -> None:
    text = b"".join(map(NAMES.bytes, tokens)).decode(errors="replace")
    text = text[: len(text) // 2] if cut else text
    rows = tuple(TokenLogprob(token, -1.0) for token in tokens)
    burst = Piece(0, text, tuple(tokens), min(accepted, len(tokens) - 1), rows)
    parts = split(burst, NAMES)
    assert len(parts) == len(tokens)
    assert "".join(part.text for part in parts) == text
    assert [token for part in parts for token in part.tokens] == tokens
    assert sum(part.num_accepted for part in parts) == burst.num_accepted
    assert tuple(row for part in parts for row in part.logprobs) == rows


def test_offsets_count_characters_once_they_are_whole() -> None:
    offsets = Offsets(NAMES, {3}.__contains__)
    assert offsets.of([0, 1, 2]) == [0, 1, 1]
    assert offsets.of([4, 3, 0]) == [2, 4, 4]
    assert offsets.of([1, 0, 0]) == [5, 6, 7]  # half a character, and then something else


def test_names_of_broken_characters_are_openais() -> None:
    assert [NAMES.name(token) for token in (0, 1, 4)] == ["a", "bytes:\\xc3", "日本"]


ODD = "a\x85b\u2028c\u2029d\x0b\x0c\x1c\x1ee\r\nf"
"""Whatever Python takes for the end of a line."""


def test_no_text_holds_what_a_client_takes_for_the_end_of_a_line() -> None:
    sent: list[bytes] = []

    async def events() -> AsyncIterator[dict[str, str]]:
        yield {"text": ODD}

    async def receive() -> dict[str, str]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    asyncio.run(EventStream(events(), lambda: None)({"type": "http"}, receive, send))  # type: ignore[arg-type]
    first, *rest = [line for line in b"".join(sent).decode().splitlines() if line]
    assert json.loads(first.removeprefix("data: ")) == {"text": ODD}
    assert rest == ["data: [DONE]"]


def test_load_reads_a_stream_whose_texts_hold_the_ends_of_lines() -> None:
    """Another server may send them as they are."""
    said = {"choices": [{"delta": {"content": ODD}}], "usage": {"completion_tokens": 3}}
    body = f"data: {json.dumps(said, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode()

    class Answer:
        async def aiter_bytes(self) -> AsyncIterator[bytes]:
            for start in range(0, len(body), 7):
                yield body[start : start + 7]

    sample = load.Sample(0)
    assert asyncio.run(load._read(Answer(), sample, 0.0)) is None
    assert sample.tokens == 3
