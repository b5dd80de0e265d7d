"""Whatever cannot be honoured is refused in OpenAI's shape, by its name, in one sentence, and harms nobody."""

from __future__ import annotations

import json

import openai
import pytest

from tests.server.conftest import live, open_tiny

TEXT = {"prompt": "ab", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# A body's additions, the field that the refusal names, and a part of its sentence.
COMPLETIONS = [
    ({"best_of": 2}, "best_of", "not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    ({"speculation": {"depht": 2}}, "speculation.depht", "leave it out"),
    ({"stream_options": {"include_usage": True}}, None, "go with stream: true"),
    ({"stream_smoothing": True}, None, "go with stream: true"),
    ({"temperature": -1}, "temperature", "0 is greedy"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"min_p": 2}, "min_p", "[0, 1]"),
    ({"top_k": -1}, "top_k", "0 keeps all"),
    ({"top_k": 1.5}, "top_k", "valid integer"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 1000}, "n", "1000 are over 128 samples"),
    ({"seed": -1}, "seed", "0 .. 2**64 - 1"),
    ({"stop": ""}, "stop", "non-empty"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop": 5}, "stop", "valid"),
    ({"stop": ["a"] * 65}, "stop", "at most 64"),
    ({"stop": "a" * 1001}, "stop", "at most 1000"),
    ({"bad_words": ["a"] * 1001}, "bad_words", "at most 1000"),
    ({"prompt": ["a"] * 129}, "n", "129 prompts"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
    ({"logit_bias": {"9999": 1}}, "logit_bias", "ids end at 264"),
    ({"bad_words": [""]}, "bad_words", "non-empty"),
    ({"min_tokens": 9}, "min_tokens", "cannot exceed max_tokens=4"),
    ({"max_tokens": 0}, "max_tokens", "asks for nothing"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 5000}, "max_tokens", "the context's 1024"),
    ({"logprobs": 21}, "logprobs", "more than the 20"),
    ({"prompt": ""}, None, "the prompt is empty"),
    ({"prompt": []}, "prompt", "the prompt is empty"),
    ({"prompt": [[]]}, None, "the prompt is empty"),
    ({"prompt": [1, 265]}, None, "ids lie in 0 .. 264"),
    ({"prompt": None}, "prompt", "wrong"),
    ({"prompt": ["a", 5]}, "prompt.1", "valid"),
    ({"prompt": "a\ud800"}, None, "half a surrogate pair"),
    ({"prompt": "ab " * 1200}, "max_tokens", "the context's 1024"),
    ({"model": "another"}, "model", "is not served here"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema goes with"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
    ({"response_format": SCHEMA}, None, "does not compile (Invalid type: no such type)"),
    ({"grammar": {"regex": "(a"}}, None, "unclosed group"),
    ({"grammar": {"lark": "start: nothing"}}, None, 'unknown name: "nothing"'),
    ({"grammar": {"choice": []}}, None, "at least one text"),
    ({"grammar": {}}, "grammar", "exactly one"),
    ({"grammar": {"regex": "a", "choice": ["a"]}}, "grammar", "exactly one"),
    ({"grammar": {"regex": "a"}, "response_format": {"type": "json_object"}}, None, "give one of them"),
    ({"speculation": {"drafter": "eagle3"}}, "speculation.drafter", "this server drafts with 'ngram'"),
    ({"speculation": {"drafter": "ngrma"}}, "speculation.drafter", "did you mean 'ngram'?"),
    ({"speculation": {"acceptance": "rejection"}}, "speculation.acceptance", "verifies by 'match'"),
    ({"speculation": {"acceptance": "lossy"}}, "speculation.acceptance", "'match' or 'rejection'"),
    ({"speculation": {"width": 0}}, "speculation.width", "greater than or equal to 1"),
    ({"timeout": 0.5}, "timeout", "greater than or equal to 1"),
    ({"logprobs_mode": "cooked"}, "logprobs_mode", "'raw' or 'warped'"),
    ({"messages": []}, "messages", "not supported"),
]
CHATS = [
    ({"messages": []}, "messages", "at least 1"),
    ({"n": 1000}, "n", "over 128 samples"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role", "'system'"),
    ({"messages": [{"role": "user"}]}, "messages.0", "content, or tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "'text'"),
    ({"messages": [{"role": "user", "content": "a", "name": "Bo"}]}, None, "does not read a message's name"),
    ({"prompt": "a"}, "prompt", "not supported"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "more than the 20"),
    ({"top_logprobs": 2}, None, "goes with logprobs: true"),
    ({"logprobs": 2}, "logprobs", "valid boolean"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, None, "different things"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "asks for nothing"),
    ({"tool_choice": "required"}, None, "goes with tools"),
    ({"tools": [TOOL], "parallel_tool_calls": False}, "tool_choice", "kept only with"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "none of the tools",
    ),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "is missing"),
    ({"functions": []}, "functions", "not supported"),
    ({"store": True}, "store", "not supported"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "not supported"),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
]
CASES = [("/v1/completions", TEXT, *case) for case in COMPLETIONS] + [
    ("/v1/chat/completions", CHAT, *case) for case in CHATS
]


def refusal(answer, status=400):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(("path", "base", "more", "param", "said"), CASES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_it_is_refused_by_its_name(served, path, base, more, param, said, stream) -> None:
    wanted = {"stream": True} if stream and not {"stream_options", "stream_smoothing"} & set(more) else {}
    with served.http() as http:
        content = json.dumps({**base, **more, **wanted})
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    error = refusal(answer, 404 if "model" in more else 400)
    assert said in error["message"]
    assert error["param"] == param
    served.settle()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"null", b"\xff\xfe", b'{"prompt": "a"', b"NaN", b"{}"])
def test_a_body_that_is_none(served, content) -> None:
    with served.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            refusal(http.post(path, content=content, headers={"Content-Type": "application/json"}))


def test_paths_and_methods(served) -> None:
    with served.http() as http:
        refusal(http.get("/v1/nothing"), 404)
        answer = http.get("/v1/completions")
        refusal(answer, 405)
        assert answer.headers["allow"] == "POST"
        refusal(http.post("/v1/models"), 405)
        refusal(http.get("/v1/models/another"), 404)
        refusal(http.post("/v1/completions", content=b"prompt=a"))


def test_the_official_client_raises_its_own_errors(client) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p=2") as refused:
        client.completions.create(model="tiny", prompt="a", top_p=2)
    assert refused.value.param == "top_p"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="gpt-5", prompt="a")


def test_one_that_fails_on_its_way_fails_alone(served, client, events) -> None:
    """Every token forbidden: refused when it happens, with the sentence, whole and streamed."""
    nothing = {"logit_bias": {str(token): -1e30 for token in range(265)}, "bad_words": [[t] for t in range(265)]}
    with served.http() as http:
        error = refusal(http.post("/v1/completions", json={**TEXT, **nothing}))
        assert "no token is left" in error["message"]
        (event,) = events(http, "/v1/completions", {**TEXT, **nothing, "stream": True})
        assert "no token is left" in event["error"]["message"]
    with pytest.raises(openai.APIError, match="no token is left"):
        list(client.completions.create(model="tiny", prompt="a", stream=True, extra_body=nothing))
    served.settle()
    assert client.completions.create(model="tiny", prompt="a", max_tokens=3).usage.completion_tokens == 3


def test_what_fails_in_handing_one_over_fails_that_one_alone(folder, monkeypatch) -> None:
    llm = open_tiny(folder, num_slots=2048)
    result = llm.result

    def broken(request, stream):
        if request.params.seed == 13:
            raise ZeroDivisionError
        return result(request, stream)

    monkeypatch.setattr(llm, "result", broken)
    with live(llm) as served, served.http() as http:
        refusal(http.post("/v1/completions", json={**TEXT, "seed": 13}), 500)
        assert http.post("/v1/completions", json={**TEXT, "seed": 14}).status_code == 200
        served.settle()


def test_an_engine_thread_that_dies_is_told_of_and_leaves_nobody_waiting(folder, monkeypatch) -> None:
    with live(open_tiny(folder, num_slots=2048)) as served, served.http() as http:
        monkeypatch.setattr(served.server.bridge, "_expire", lambda: 1 / 0)
        monkeypatch.setattr("threading.excepthook", lambda _: None)  # what it died of is the log's
        assert "shutting down" in refusal(http.post("/v1/completions", json=TEXT), 503)["message"]
        refusal(http.post("/v1/completions", json=TEXT), 503)
        assert http.get("/health").status_code == 503
        assert http.get("/ready").status_code == 503
        assert served.server.bridge.num_open == 0


def test_a_fault_of_ours_is_told_to_the_log_alone(folder, caplog) -> None:
    llm = open_tiny(folder, num_slots=2048)
    with live(llm) as served, served.http() as http:
        step = llm.engine.step

        def broken():
            raise ZeroDivisionError("the secret of /etc")

        llm.engine.step = broken
        error = refusal(http.post("/v1/completions", json=TEXT), 500)
        assert error == {
            "message": "the server failed on this request; its log says why",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        assert "the secret" in caplog.text
        llm.engine.step = step
        served.settle()
        assert http.post("/v1/completions", json=TEXT).status_code == 200
        assert http.get("/health").status_code == 200
