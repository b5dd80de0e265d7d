"""The shapes of answers: log-probabilities, echoes, models, tokens, and the fields around them."""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from outrider.server.protocol import CompletionAsk

PROMPT = "abc the é, abc"


@pytest.fixture(scope="module")
def told(served):
    """What the engine itself tells."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=3, prompt_logprobs=3)
    (result,) = served.llm.generate(PROMPT, params, raw=True)
    return result


def test_a_completions_logprobs_and_echo(served, client, told) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, seed=3, max_tokens=12, logprobs=3, echo=True)
    (choice,) = answer.choices
    assert choice.text == PROMPT + told.text
    found = choice.logprobs
    ids = [*served.llm.encode(PROMPT, raw=True), *told.token_ids]
    rows = [*told.prompt_logprobs, *told.logprobs]
    assert found.token_logprobs == [None, *(row.logprob for row in rows[1:])]
    assert len(found.tokens) == len(ids) == len(found.text_offset)
    names = served.server.voice.names
    assert found.tokens == [names.name(token) for token in ids]
    for row, top in zip(rows[1:], found.top_logprobs[1:], strict=True):
        best = {names.name(token): value for token, value in row.top}
        assert best.items() <= top.items()
        assert top[names.name(row.token)] == row.logprob
    for token, name, offset in zip(ids, found.tokens, found.text_offset, strict=True):
        if not name.startswith("bytes:") and token not in served.server.voice.special:
            assert choice.text[offset:].startswith(name)


def test_scoring_a_prompt_alone(served, client, told) -> None:
    """As lm_eval asks: nothing generated, all of the prompt's log-probabilities."""
    answer = client.completions.create(
        model="tiny", prompt=[PROMPT, "the"], max_tokens=0, logprobs=1, echo=True, temperature=0
    )
    first, second = answer.choices
    assert (first.text, second.text) == (PROMPT, "the")
    assert first.logprobs.token_logprobs[1:] == [row.logprob for row in told.prompt_logprobs[1:]]
    assert first.finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    assert second.logprobs.token_logprobs[0] is None


def test_a_streams_logprobs_are_the_wholes(served, client) -> None:
    call = {"model": "tiny", "prompt": PROMPT, "seed": 3, "max_tokens": 20, "logprobs": 2, "echo": True, "n": 2}
    whole = client.completions.create(**call)
    lists = [{name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} for _ in range(2)]
    for chunk in client.completions.create(**call, stream=True):
        for choice in chunk.choices:
            for name, found in lists[choice.index].items():
                found += getattr(choice.logprobs, name) if choice.logprobs else []
    assert lists == [choice.logprobs.model_dump() for choice in whole.choices]


def test_a_chats_logprobs(served, client) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=2)
    (result,) = served.llm.generate(messages, params)
    call = {"model": "tiny", "messages": messages, "seed": 3, "max_completion_tokens": 12, "top_logprobs": 2}
    answer = client.chat.completions.create(**call, logprobs=True)
    names = served.server.voice.names
    content = answer.choices[0].logprobs.content
    assert [row.logprob for row in content] == [row.logprob for row in result.logprobs]
    assert [[top.logprob for top in row.top_logprobs] for row in content] == [
        [logprob for _, logprob in row.top] for row in result.logprobs
    ]
    assert [bytes(row.bytes) for row in content] == [names.bytes(token) for token in result.token_ids]
    assert len(content) == answer.usage.completion_tokens
    streamed = [
        row
        for chunk in client.chat.completions.create(**call, logprobs=True, stream=True)
        for choice in chunk.choices
        for row in (choice.logprobs.content if choice.logprobs else [])
    ]
    assert [row.logprob for row in streamed] == [row.logprob for row in content]


def test_a_chats_roles_and_parts(served, client) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    turns = [
        [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}],
        [{"role": "system", "content": "be"}, {"role": "user", "content": "abc"}],
    ]
    texts = [
        client.chat.completions.create(model="tiny", messages=t, seed=1, max_tokens=9).choices[0].message.content
        for t in turns
    ]
    assert texts[0] == texts[1]


def test_a_chat_without_a_limit_goes_to_the_end_of_the_context(served, client) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == served.llm.resolved.max_context
    assert answer.choices[0].finish_reason == "length"


def test_null_is_the_default(served) -> None:
    fields = {name: None for name in CompletionAsk.model_fields if name != "prompt"}
    with served.http() as http:
        asked = {**fields, "prompt": "ab", "seed": 5, "ignore_eos": True}
        found = http.post("/v1/completions", json=asked).json()
        short = http.post("/v1/completions", json={"prompt": "ab", "seed": 5, "ignore_eos": True}).json()
    assert found["choices"] == short["choices"]
    assert found["usage"]["completion_tokens"] == 16


def test_models_tell_how_exact_they_are(served, client) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.exactness == "seed"
    assert client.models.retrieve("tiny") == model


def test_tokenize_and_back(served) -> None:
    with served.http() as http:
        found = http.post("/tokenize", json={"prompt": PROMPT}).json()
        assert found["tokens"] == list(served.llm.encode(PROMPT, raw=True))
        assert found["count"] == len(found["tokens"])
        assert found["max_model_len"] == 1024
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": PROMPT}
        messages = [{"role": "user", "content": "ab"}]
        chat = http.post("/tokenize", json={"messages": messages}).json()
        assert chat["tokens"] == list(served.llm.encode(messages))
        assert http.post("/detokenize", json={"tokens": [999]}).status_code == 400


def test_every_answer_names_its_request(served) -> None:
    with served.http() as http:
        assert http.get("/health").headers["x-request-id"] != http.get("/health").headers["x-request-id"]
        assert http.get("/ready", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
        forged = http.get("/ready", headers={"X-Request-Id": 'a"b c'}).headers["x-request-id"]
        assert len(forged) == 32
