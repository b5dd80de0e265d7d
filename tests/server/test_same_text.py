"""Over HTTP every text is the one that `LLM.generate` gives: each field, whole and streamed, guessed or not."""

from __future__ import annotations

import pytest

from outrider import SamplingParams

PROMPT = "abc the abc the abc"
SEED = 7
# By field: what the body says, and what `SamplingParams` says for the same.
FIELDS = {
    "nothing": ({}, {}),
    "temperature": ({"temperature": 0.3}, {"temperature": 0.3}),
    "greedy": ({"temperature": 0}, {"temperature": 0.0}),
    "top_p": ({"top_p": 0.4}, {"top_p": 0.4}),
    "top_k": ({"top_k": 3}, {"top_k": 3}),
    "min_p": ({"min_p": 0.3}, {"min_p": 0.3}),
    "frequency_penalty": ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    "presence_penalty": ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    "repetition_penalty": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "logit_bias": ({"logit_bias": {"64": 20, "65": 19.5}}, {"logit_bias": {64: 20.0, 65: 19.5}}),
    "bad_words": ({"bad_words": ["ab", [70]]}, {"bad_words": ("ab", (70,))}),
    "min_tokens": ({"min_tokens": 5, "logit_bias": {"264": 40}}, {"min_tokens": 5, "logit_bias": {264: 40.0}}),
    "stop": ({"stop": "A"}, {"stop": ("A",)}),
    "stops": ({"stop": ["zz", "1"]}, {"stop": ("zz", "1")}),
    "stop_token_ids": ({"stop_token_ids": [64, 65, 66, 67]}, {"stop_token_ids": (64, 65, 66, 67)}),
    "ignore_eos": (
        {"ignore_eos": True, "logit_bias": {"264": 5}},
        {"ignore_eos": True, "logit_bias": {264: 5.0}},
    ),
    "n": ({"n": 3}, {"n": 3}),
    "seed": ({"seed": 2**63 + 5}, {"seed": 2**63 + 5}),
}
SPECULATION = {"on": {}, "off": {"enabled": False}, "shallow": {"depth": 1, "width": 1}, "none": {"drafter": "none"}}


def expected(llm, given, raw=True, prompt=PROMPT):
    params = SamplingParams(**{"temperature": 1.0, "seed": SEED, "max_tokens": 32, **given})
    return llm.generate(prompt, params, raw=raw)


def body(given, **more):
    return {"model": "tiny", "seed": SEED, "max_tokens": 32, **given, **more}


def of_stream(events) -> dict[int, tuple[str, str]]:
    """Text and reason by choice, of raw SSE events."""
    texts, reasons = {}, {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            assert choice["index"] not in reasons, "something follows the end of a choice"
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    return {index: (text, reasons[index]) for index, text in texts.items()}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_whole_and_streamed(served, events, name) -> None:
    asked, given = FIELDS[name]
    texts = {i: (r.text, r.finish_reason) for i, r in enumerate(expected(served.llm, given))}
    with served.http() as http:
        for wish in SPECULATION.values():
            whole = http.post("/v1/completions", json=body(asked, prompt=PROMPT, speculation=wish)).json()
            assert {c["index"]: (c["text"], c["finish_reason"]) for c in whole["choices"]} == texts
            assert whole["exactness"] == "seed"
            assert whole["seed"] == given.get("seed", SEED)
        for smooth in (False, True):
            asked_stream = body(asked, prompt=PROMPT, stream=True, stream_smoothing=smooth)
            assert of_stream(events(http, "/v1/completions", asked_stream)) == texts
    served.settle()


@pytest.mark.parametrize("name", FIELDS)
def test_chats_through_the_official_client(served, client, name) -> None:
    asked, given = FIELDS[name]
    messages = [{"role": "system", "content": "be ab"}, {"role": "user", "content": PROMPT}]
    texts = [r.text for r in expected(served.llm, given, raw=False, prompt=messages)]
    ours = {k: asked[k] for k in asked if k in ("top_k", "min_p", "repetition_penalty", "bad_words", "min_tokens")}
    ours |= {k: asked[k] for k in asked if k in ("stop_token_ids", "ignore_eos")}
    theirs = {k: v for k, v in asked.items() if k not in ours}
    call = {"model": "tiny", "messages": messages, "extra_body": ours, **{"seed": SEED, "max_tokens": 32, **theirs}}
    answer = client.chat.completions.create(**call)
    assert [choice.message.content for choice in answer.choices] == texts
    streamed = [""] * len(texts)
    for chunk in client.chat.completions.create(**call, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_guesses_are_made_and_bursts_come(served, client) -> None:
    """What the tests here compare would be worth little without them."""
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=200)
    told = answer.usage.speculation
    assert told["accepted"] > 20
    assert told["tau"] == 1 + told["accepted"] / told["cycles"] == (answer.usage.completion_tokens - 1) / told["cycles"]
    assert sum(told["accepted_by_position"]) == told["accepted"] <= told["drafted"]


def test_one_plain_beside_one_guessing(served, client) -> None:
    """Fault 36."""
    both = [
        client.completions.create(
            model="tiny", prompt=PROMPT, temperature=0, max_tokens=100, extra_body={"speculation": {"enabled": enabled}}
        )
        for enabled in (True, False)
    ]
    drafted = [answer.usage.speculation["drafted"] for answer in both]
    assert drafted[0] > 0 == drafted[1]
    assert both[0].choices[0].text == both[1].choices[0].text


def test_several_prompts_are_choices_in_order(served, client) -> None:
    prompts = [PROMPT, "the", PROMPT[3:]]
    params = SamplingParams(temperature=1.0, seed=SEED, max_tokens=9, n=2)
    texts = [r.text for r in served.llm.generate(prompts, params, raw=True)]
    answer = client.completions.create(model="tiny", prompt=prompts, seed=SEED, max_tokens=9, n=2)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(6))
    ids = [served.llm.encode(prompt, raw=True) for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    by_ids = client.completions.create(model="tiny", prompt=[list(i) for i in ids], seed=SEED, max_tokens=9, n=2)
    assert [choice.text for choice in by_ids.choices] == texts


def test_a_seed_that_was_drawn_repeats_the_text(client) -> None:
    first = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20)
    again = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, seed=first.seed)
    assert again.choices[0].text == first.choices[0].text
    assert again.system_fingerprint == first.system_fingerprint


def test_a_prefix_that_is_cached_changes_nothing_and_is_counted(served, client) -> None:
    """Faults 14 and 33: with guesses and without, as much is found."""
    long, found = PROMPT * 12, {}
    for enabled in (True, False):
        text = f"{enabled}{long}"
        for _ in range(2):
            answer = client.completions.create(
                model="tiny", prompt=text, seed=3, max_tokens=40, extra_body={"speculation": {"enabled": enabled}}
            )
            cached = answer.usage.prompt_tokens_details.cached_tokens
            found.setdefault(enabled, []).append((cached, answer.choices[0].text))
    for (cold, text), (warm, again) in found.values():
        assert cold == 0 < warm
        assert text == again
    assert abs(found[True][1][0] - found[False][1][0]) <= served.llm.config.block_size
