"""Shaped texts over HTTP: JSON, grammars and calls of tools, the same guessed and plain, streamed and whole."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.errors import ApiError
from outrider.server.tools import ToolFormat, ToolStream
from tests.server.test_same_text import of_stream

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Łódź"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]
MESSAGES = [{"role": "user", "content": "abc the"}]
SHAPES = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "object": {"response_format": {"type": "json_object"}},
    "regex": {"grammar": {"regex": "[a-f]{8}(é|日本)"}},
    "lark": {"grammar": {"lark": 'start: "(" inner ")"\ninner: "a" | "(" inner ")"'}},
    "choice": {"grammar": {"choice": ["yes", "no", 'say "no"\n']}},
}
HOLDS = {
    "schema": lambda text: json.loads(text).keys() == {"city", "days"},
    "object": lambda text: isinstance(json.loads(text), dict),
    "regex": lambda text: text[:8].strip("abcdef") == "" and text[8:] in ("é", "日本"),
    "lark": lambda text: text.count("(") == text.count(")") and text.strip("()") == "a",
    "choice": lambda text: text in ("yes", "no", 'say "no"\n'),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_shape_is_kept_whatever_is_guessed(served, events, name, temperature) -> None:
    # Free text in JSON may go on to the end of the context, in which case it is cut.
    asked = {"prompt": "ab", "max_tokens": 300, "temperature": temperature, "seed": 11, **SHAPES[name]}
    with served.http() as http:
        found = [
            http.post("/v1/completions", json={**asked, "speculation": {"enabled": enabled}}).json()["choices"][0]
            for enabled in (True, False)
        ]
        text, reason = of_stream(events(http, "/v1/completions", {**asked, "stream": True}))[0]
    assert found[0] == found[1]
    assert (text, reason) == (found[0]["text"], found[0]["finish_reason"])
    if name != "object":
        assert reason == "stop"
    if reason == "stop":
        assert HOLDS[name](text), text
    served.settle()


def chat(client, **more):
    return client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=200, seed=4, tools=TOOLS, **more)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_come_comes_as_its_schema_says(client, choice) -> None:
    answer = chat(client, tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in ("Rome", "Łódź")
        assert 0 <= arguments["days"] <= 99
    else:
        assert (call.function.name, arguments) == ("stop", {})
    streamed, content = [], ""
    for chunk in chat(client, tool_choice=choice, parallel_tool_calls=False, stream=True):
        streamed += chunk.choices[0].delta.tool_calls or []
        content += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason
    assert [(c.index, c.function) for c in streamed] == [(0, streamed[0].function)]
    assert streamed[0].function.model_dump() == call.function.model_dump()
    assert content.strip() == ""
    assert reason == "tool_calls"


def test_tools_are_in_the_prompt_and_a_finished_call_too(served, client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=turns, tools=TOOLS, max_tokens=2, seed=1)
    seen = [{**m, "content": m.get("content", "")} for m in turns]
    seen[1] = {**seen[1], "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]}
    assert answer.usage.prompt_tokens == len(served.llm.encode(seen, tools=TOOLS))
    without = client.chat.completions.create(
        model="tiny", messages=turns, tools=TOOLS, tool_choice="none", max_tokens=2, seed=1
    )
    assert without.usage.prompt_tokens == len(served.llm.encode(seen))


def test_a_model_whose_template_shows_no_calls_takes_no_tools() -> None:
    with pytest.raises(ApiError, match="shows no calls"):
        ToolFormat("{% for message in messages %}{{ message['content'] }}{% endfor %}")


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "<b>"}}\n</tool_call>'
TEXTS = {
    "plain": ("no call < here <tool", "no call < here <tool", []),
    "one": (f"well: {CALL}", "well: ", ["f"]),
    "two": (f"{CALL}\n{CALL} done", "\n done", ["f", "f"]),
    "broken": ("<tool_call>{oops</tool_call>!", "<tool_call>{oops</tool_call>!", []),
    "unfinished": ('a<tool_call>{"name": "f"', 'a<tool_call>{"name": "f"', []),
    "no name": ('<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    "deep": (f"<tool_call>{'[' * 100_000}</tool_call>", f"<tool_call>{'[' * 100_000}</tool_call>", []),
    "a list": ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
}


@pytest.mark.parametrize("name", TEXTS)
@given(cuts=st.sets(st.integers(0, 130)))
def test_calls_are_found_however_the_text_is_cut(name, cuts) -> None:
    text, want, names = TEXTS[name]
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    stream, said, calls = ToolStream(), "", []
    for start, stop in itertools.pairwise(places):
        more, found = stream.push(text[start:stop])
        said, calls = said + more, calls + found
        assert not said.endswith("<tool_call")
    said += stream.finish()
    assert said == want
    assert [call.name for call in calls] == names
    assert all(json.loads(call.arguments) == {"x": "<b>"} for call in calls)
