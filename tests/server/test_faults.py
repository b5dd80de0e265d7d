"""Faults that other servers shipped with, over HTTP: batches, ends, log-probabilities, cached prefixes, two servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from outrider import SamplingParams
from tests.server.conftest import Live, live, open_tiny
from tests.server.test_metrics import figures
from tests.server.test_same_text import body, of_stream

PROMPT = "abc the abc the abc"
PLAIN = {"enabled": False}
TEXTS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "n": 3},
    "logprobs": {"temperature": 0.8, "logprobs": 3, "echo": True},
    "stop": {"temperature": 0, "stop": ["c", "the"]},
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "shape": {"grammar": {"regex": "[a-f]{9}(é|日本)"}},
    "several": {"prompt": [PROMPT, "the é", "a"], "n": 2},
}


def ours(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what belongs to one request or tells of guesses."""
    usage = {name: value for name, value in answer["usage"].items() if name != "speculation"}
    return {name: value for name, value in answer.items() if name not in ("id", "created")} | {"usage": usage}


def test_two_servers_with_guesses_and_without_give_the_same_answers(folder) -> None:
    """Fault 3: of the same bodies, in the same order, all that is told is the same, but the guesses."""
    found: list[list[Any]] = []
    drafted = []
    for drafter in ("ngram", "none"):
        with live(open_tiny(folder, drafter=drafter, num_slots=2048)) as served, served.http() as http:
            answers = [
                http.post("/v1/completions", json=body(more, **{"prompt": PROMPT} | more)) for more in TEXTS.values()
            ]
            messages = [{"role": "user", "content": PROMPT}]
            answers.append(http.post("/v1/chat/completions", json=body({"messages": messages, "logprobs": True})))
            found.append([ours(answer.json()) for answer in answers])
            drafted.append(sum(answer.json()["usage"]["speculation"]["drafted"] for answer in answers))
    assert found[0] == found[1]
    assert drafted[0] > 0 == drafted[1]


def unequal(number: int) -> dict[str, Any]:
    """Prompts of 1 to 300 tokens, a few of them longer than a pass has rows; trees of depth 0 to 4."""
    size = 1 + number * 5 if number % 9 else 60 + number
    return {
        "prompt": f"{number} abc the " + "ab the " * (size // 3),
        "seed": number,
        "max_tokens": 6 + number % 17,
        "temperature": number % 3 / 2,
        "logprobs": number % 2,
        "ignore_eos": True,
        "stream": number % 4 == 0,
        "speculation": {"depth": number % 5},
    }


def test_sixty_four_at_once_each_equal_their_solo_run(folder) -> None:
    """Faults 16 and 26 to 29: prompts in chunks, plain rows and trees share passes, and some give way on the way."""
    llm = open_tiny(folder, num_slots=1600, max_context=512, block_size=4, max_requests=16, max_rows=48)
    found: dict[int, Any] = {}

    async def ask(http: httpx.AsyncClient, number: int) -> None:
        late = number % 4 == 3  # of another client's, whose share is still to be had then
        await asyncio.sleep(0.3 * late)
        headers = {"X-Forwarded-For": f"10.0.0.{1 + late}"}
        answer = await http.post("/v1/completions", json=unequal(number), headers=headers)
        assert answer.status_code == 200, answer.text
        if not unequal(number)["stream"]:
            (choice,) = answer.json()["choices"]
            found[number] = choice["text"], choice["logprobs"]["token_logprobs"], answer.json()["usage"]
            return
        choices = [c for line in answer.text.split("\n\n")[:-2] for c in json.loads(line[6:])["choices"]]
        rows = [row for c in choices for row in (c["logprobs"] or {"token_logprobs": []})["token_logprobs"]]
        found[number] = "".join(c["text"] for c in choices), rows, None

    async def all_of_them(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            await asyncio.gather(*(ask(http, number) for number in range(64)))

    with live(llm) as served:
        asyncio.run(all_of_them(served.url))
        served.settle()
        with served.http() as http:
            told = figures(http)
    assert told["outrider_num_preemptions",] > 0, "the test wants some to give way"
    assert told["outrider_num_requests_running",] == told["outrider_num_requests_waiting",] == 0
    assert told["outrider_kv_cache_usage_perc",] == 0
    assert told["outrider_spec_decode_num_accepted_tokens_total", "ngram"] > 20
    for number, (text, rows, usage) in found.items():
        asked = unequal(number)
        params = SamplingParams(
            temperature=float(asked["temperature"]),
            ignore_eos=True,
            speculation=False,
            **{name: asked[name] for name in ("seed", "max_tokens", "logprobs")},
        )
        (alone,) = llm.generate(asked["prompt"], params, raw=True)
        assert (text, rows) == (alone.text, [row.logprob for row in alone.logprobs]), number
        assert usage is None or usage["completion_tokens"] == len(rows)


FORCED = "abc the 12 abc"


def forced(served: Live, **more: Any) -> dict[str, Any]:
    """A text that is guessed whole behind its first token: it stands in the prompt, and nothing else may be said."""
    asked = {"prompt": f"{FORCED}; {FORCED}; ", "temperature": 0, "max_tokens": 30, "grammar": {"choice": [FORCED]}}
    with served.http() as http:
        answer = http.post("/v1/completions", json={**asked, "logprobs": 0, "speculation": {"trace": True}, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_end_inside_an_accepted_run_ends_the_answer(served) -> None:
    """Faults 18, 19, 20: an end token and every max_tokens, at every place of a run of accepted guesses."""
    ids = served.llm.prompts.tokenize(FORCED)
    whole = forced(served)
    assert whole["choices"][0]["text"] == FORCED
    assert whole["usage"]["speculation"]["accepted"] >= len(ids) - 3
    was_guessed = 0
    for place, token in enumerate(ids):
        if token in ids[:place]:
            continue
        for most in (place, place + 1, 30):
            if not most:
                continue
            answer = forced(served, stop_token_ids=[token], max_tokens=most)
            (choice,), usage = answer["choices"], answer["usage"]
            is_cut = most <= place
            said = ids[: most if is_cut else place]
            assert choice["text"] == served.llm.prompts.decode(said)
            assert choice["finish_reason"] == ("length" if is_cut else "stop")
            cycles = usage["speculation"]["trace"]
            delivered = [t["id"] for cycle in cycles for t in cycle["tokens"]]
            assert delivered == [*said, *([] if is_cut else [token])]
            assert len(delivered) == usage["completion_tokens"] == len(choice["logprobs"]["token_logprobs"])
            last = cycles[-1]
            was_guessed += sum(node["verdict"] == "accepted" for node in last["nodes"]) >= len(last["tokens"]) > 1
    assert was_guessed > 2, "ends are wanted that were guesses themselves"


def test_a_stream_in_pieces_of_any_size_is_the_same_text(served, events) -> None:
    """Faults 20 and 22: the deeper the trees, the larger the pieces."""
    asked = body({"temperature": 0, "max_tokens": 90, "logprobs": 0, "stream": True}, prompt="é 日本 é 日本 the é 日本")
    asked["stream_options"] = {"include_usage": True}
    found, sizes = [], []
    with served.http() as http:
        for depth in (0, 1, 2, 3, 4):
            told = list(events(http, "/v1/completions", {**asked, "speculation": {"depth": depth}}))
            usage = told.pop()["usage"]
            rows = [row for e in told for c in e["choices"] for row in (c["logprobs"] or {}).get("token_logprobs", [])]
            assert len(rows) == usage["completion_tokens"]
            found.append((of_stream(told), rows))
            sizes.append(len(told))
    assert all(one == found[0] for one in found)
    assert sizes[0] > sizes[-1], "deeper trees make fewer and larger pieces"


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 47, 48, 49, 97])
def test_logprobs_are_plain_decodings_and_change_no_text(size, cold) -> None:
    """Fault 23: around every edge of blocks (16) and of what a pass reads (48), cold and with the prefix cached."""
    ids = [(7 * place + size) % 255 for place in range(size)]
    asked = {"prompt": ids, "seed": 5, "max_tokens": 7, "ignore_eos": True}
    told = {**asked, "logprobs": 2, "echo": True}
    with cold.http() as http:
        first = http.post("/v1/completions", json={**told, "speculation": PLAIN}).json()
        text = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        for wish in (PLAIN, {}):
            again = http.post("/v1/completions", json={**told, "speculation": wish}).json()
            assert again["choices"] == first["choices"]
    (choice,) = first["choices"]
    assert choice["text"].endswith(text)
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == size + 7
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=7, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    (alone,) = cold.llm.generate([ids], params, raw=True)
    rows = [row.logprob for row in (*alone.prompt_logprobs[1:], *alone.logprobs)]
    assert logprobs["token_logprobs"][1:] == rows


@pytest.fixture(scope="module")
def cold(folder):
    with live(open_tiny(folder, num_slots=4096, max_rows=48)) as served:
        yield served


def test_a_conversation_finds_as_much_cached_with_guesses_as_without(folder) -> None:
    """Faults 14 and 33: turn by turn, on a server each that has seen nothing else."""
    found = []
    for enabled in (True, False):
        turns: list[dict[str, str]] = []
        told = []
        with live(open_tiny(folder, num_slots=4096, block_size=4)) as served, served.http() as http:
            for number in range(5):
                turns.append({"role": "user", "content": f"abc the {number} abc the"})
                asked = {"messages": turns, "seed": number, "max_tokens": 24, "temperature": number % 2}
                answer = http.post("/v1/chat/completions", json={**asked, "speculation": {"enabled": enabled}}).json()
                said = answer["choices"][0]["message"]["content"]
                turns.append({"role": "assistant", "content": said})
                told.append((answer["usage"]["prompt_tokens_details"]["cached_tokens"], said))
        found.append(told)
    assert found[0] == found[1]
    cached = [count for count, _ in found[0]]
    assert cached[0] == 0
    assert cached[1:] == sorted(cached[1:])
    assert cached[1] > 0
