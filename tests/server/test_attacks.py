"""What one client may not do to the others: bodies that cost much to refuse, grammar bombs, clients that are deaf."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest

from outrider.errors import RequestError
from outrider.server import run, service
from outrider.server.errors import LONGEST
from tests.server.conftest import Live, live, open_tiny
from tests.server.test_refusals import TEXT, refusal


def post(served: Live, content: str, path: str = "/v1/completions") -> httpx.Response:
    with served.http() as http:
        return http.post(path, content=content, headers={"Content-Type": "application/json"})


# Bodies of a megabyte or more in which everything is wrong: the first fault is told of, and the rest is not looked at.
WRONG = {
    "ids": json.dumps({"prompt": [0.5] * 400_000}),
    "texts": json.dumps({"prompt": ["a", *[5] * 400_000]}),
    "fields": json.dumps({f"field {number}": 1 for number in range(100_000)}),
    "biases": json.dumps({**TEXT, "logit_bias": {str(number): "x" for number in range(100_000)}}),
    "words": json.dumps({**TEXT, "bad_words": [5] * 400_000}),
    "stops": json.dumps({**TEXT, "stop": [5] * 400_000}),
    "choices": json.dumps({**TEXT, "grammar": {"choice": [5] * 400_000}}),
    "parts of speculation": json.dumps({**TEXT, "speculation": {f"field {n}": 1 for n in range(100_000)}}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_body_full_of_faults_costs_no_more_than_one(served, name) -> None:
    """Others wait while a body is looked at; listing four hundred thousand faults took a core eight seconds."""
    before = time.process_time()
    error = refusal(post(served, WRONG[name]))
    assert time.process_time() - before < 2
    assert len(error["message"]) <= LONGEST + 5


def test_what_was_sent_comes_back_in_a_refusal_only_in_part(served) -> None:
    long = "u" * 300_000
    bodies = [
        {**TEXT, long: 1},
        {**TEXT, "speculation": {long: 1}},
        {**TEXT, "speculation": {"drafter": long}},
        {**TEXT, "seed": int("9" * 4000)},
        {**TEXT, "n": int("9" * 4000)},
        {**TEXT, "logit_bias": {"1" * 5000: 1}},
        {**TEXT, "grammar": {"regex": "(" * 5000 + "a" + ")" * 5000}},
        {**TEXT, "grammar": {"lark": "start: " + "(" * 5000 + '"a"' + ")" * 5000}},
    ]
    for asked in bodies:
        answer = post(served, json.dumps(asked))
        assert len(refusal(answer)["message"]) <= LONGEST + 5
        assert len(answer.content) < 4 * LONGEST
    assert len(refusal(post(served, json.dumps({**TEXT, "model": long})), 404)["message"]) <= LONGEST + 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no JSON object"),
        ("[1]", "no JSON object"),
        ("[" * 100_000, "cannot be read"),
        ('{"prompt": ' + "[" * 20_000 + "]" * 20_000 + "}", "cannot be read"),
        ('{"prompt": "a", "seed": 1' + "0" * 5000 + "}", "cannot be read"),
        ('{"prompt": "a", "temperature": NaN}', "finite"),
        ('{"prompt": "a", "temperature": 1e999}', "finite"),
        ('{"prompt": "a", "logit_bias": {"5": NaN}}', "map token ids to numbers"),
        ('{"prompt": "a", "frequency_penalty": Infinity}', "finite"),
    ],
)
def test_bodies_that_parsers_stumble_over(served, content, said) -> None:
    assert said in refusal(post(served, content))["message"]


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[" * 900 + "]" * 900, "", "1" * 5000])
def test_arguments_of_an_earlier_call_that_are_no_json(served, arguments) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    refusal(post(served, json.dumps({"messages": turns, "max_tokens": 2}), "/v1/chat/completions"))


BOMBS = {
    "nothing by its rules": ({"lark": "start: a\na: b\nb: a\n"}, "no text fits it"),
    "itself": ({"lark": "start: start"}, "no text fits it"),
    "too many states": ({"regex": "(a?){3000}a{3000}"}, "cannot be followed (lexer error"),
    "too long": ({"lark": "start: " + " | ".join(f'"{number}"' for number in range(20_000))}, "are compiled"),
    "many choices": ({"choice": [f"choice {number}" for number in range(20_000)]}, "are compiled"),
    "half a character": ({"regex": "\ud800"}, "half a surrogate pair"),
    "too many rows": ({"lark": "start: " + " | ".join(f'"a{number}"' for number in range(3000))}, "cannot be followed"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_grammar_bomb_is_refused_and_tells_nothing_of_our_inside(served, name) -> None:
    grammar, said = BOMBS[name]
    error = refusal(post(served, json.dumps({**TEXT, "grammar": grammar})))
    assert said in error["message"]
    assert not {"<state>", "<backtrace>", "RuntimeError"} & set(error["message"].split())
    assert "Tokens:" not in error["message"]
    served.settle()


def test_a_schema_that_refers_to_itself_alone_is_refused(served) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    assert "no text fits it" in refusal(post(served, json.dumps({**TEXT, "response_format": shape})))["message"]


def test_a_thousand_choices_are_compiled(served) -> None:
    texts = [f"choice {number}" for number in range(3000)]
    answer = post(served, json.dumps({**TEXT, "max_tokens": 30, "grammar": {"choice": texts}}))
    assert answer.json()["choices"][0]["text"] in texts


def test_a_prompt_that_cannot_fit_is_not_tokenized(served, monkeypatch) -> None:
    def never(*_, **__):
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(served.llm.prompts, "tokenize", never)
    text = "a" * 100_000
    for path, asked in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["a", text]}),
        ("/v1/completions", {"prompt": [5] * 20_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
        ("/detokenize", {"tokens": [5] * 20_000}),
    ):
        error = refusal(post(served, json.dumps(asked), path))
        assert error["code"] == "context_length_exceeded"


def test_bad_words_are_not_tokenized_by_the_engines_thread(served, monkeypatch) -> None:
    seen, tokenize = set(), served.llm.prompts.tokenize

    def tell(*words, **settings):
        seen.add(threading.current_thread().name)
        return tokenize(*words, **settings)

    monkeypatch.setattr(served.llm.prompts, "tokenize", tell)
    assert post(served, json.dumps({**TEXT, "bad_words": ["the", "er"]})).status_code == 200
    assert seen
    assert not any(name == "engine" for name in seen)


def test_whoever_leaves_before_its_turn_is_not_worked_for(served, monkeypatch) -> None:
    """A client whose grammars are slow to compile, and who is gone, is passed over."""
    made, go_on = [], threading.Event()
    completion = served.server.preparer.completion

    def slow(ask):
        made.append(ask.user)
        go_on.wait(20)
        return completion(ask)

    monkeypatch.setattr(served.server.preparer, "completion", slow)

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as http:
            tasks = [asyncio.create_task(http.post("/v1/completions", json={**TEXT, "user": str(n)})) for n in range(4)]
            while not made or served.server.turns.num_waiting("127.0.0.1") < 3:
                await asyncio.sleep(0.005)
            kept = next(n for n in range(4) if made == [str(n)])
            for number, task in enumerate(tasks):
                if number != kept:
                    task.cancel()
            while any(one.done() is False for line in served.server.turns._lines.values() for one in line):
                await asyncio.sleep(0.005)
            go_on.set()
            assert (await tasks[kept]).status_code == 200

    asyncio.run(all_of_them())
    assert len(made) == 1
    served.settle()


def test_a_large_answer_is_written_beside_the_event_loop(served, monkeypatch) -> None:
    asked = {"prompt": "ab the " * 30, "max_tokens": 4, "echo": True, "logprobs": 20, "n": 4, "seed": 1}
    expected = post(served, json.dumps(asked)).json()["choices"]
    monkeypatch.setattr(service, "LARGE", 10**9)
    assert post(served, json.dumps(asked)).json()["choices"] == expected


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system lets nobody go")
def test_a_client_that_takes_nothing_is_let_go(folder, monkeypatch) -> None:
    monkeypatch.setattr(run, "DEAF_SECONDS", 1)
    llm = open_tiny(folder)
    asked = {"prompt": "ab the " * 60, "max_tokens": 400, "ignore_eos": True, "logprobs": 20, "echo": True, "n": 16}
    sent = json.dumps({**asked, "stream": True, "speculation": {"trace": True}}).encode()
    with live(llm) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(sent)}\r\n"
            deaf.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + sent)
            deadline = time.monotonic() + 60
            connections = served.runner.server_state.connections
            while not connections:
                time.sleep(0.01)
            while connections:
                assert time.monotonic() < deadline, "it is still waited for"
                time.sleep(0.05)
        served.settle()


def test_a_request_that_its_grammar_stops_harms_no_neighbour(served) -> None:
    """Refused in the middle of its text, with the sentence, while another goes on."""
    with served.http() as http:
        alone = http.post("/v1/completions", json={**TEXT, "seed": 1, "max_tokens": 40}).json()["choices"]
    found = []
    other = threading.Thread(
        target=lambda: found.append(post(served, json.dumps({**TEXT, "seed": 1, "max_tokens": 40})).json()["choices"])
    )
    other.start()
    refusal(post(served, json.dumps({**TEXT, "grammar": {"regex": "(a?){3000}a{3000}"}})))
    other.join()
    assert found == [alone]
    with pytest.raises(RequestError, match="no text fits it"):
        served.server.preparer.grammars.lark("start: start")
