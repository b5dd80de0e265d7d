"""SmolLM2 itself: Transformers' own greedy text, and the same text with and without every drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2_contingency

from outrider import LLM, SamplingParams
from outrider.errors import RequestError
from outrider.models.heads import files
from outrider.registry import DRAFTERS
from outrider.result import Result
from outrider.sampling.automaton import TokenAutomaton
from tests import artefacts

Open = Callable[..., LLM]

PROMPTS = [
    "Name three rivers of Europe, one sentence about each.",
    "Repeat this list word by word: apple, pear, plum, apple, pear, plum, apple, pear, plum.",
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n\n"
    "Write the same function again, with the name `amount`.",
    "Übersetze ins Englische: „Der Fluss ist 🙂 breit und 漢字 sind schwer.“",
]
FIELDS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.8, "presence_penalty": -0.5},
    "bans": {"logit_bias": {28: -100.0, 339: 2.0}, "bad_words": ("river", (253, 198)), "min_tokens": 14},
    "stops": {"stop": ("river", "\n\n"), "stop_token_ids": (30,)},
}


def weights_for(drafter: str, open_llm: Open) -> dict[str, str]:
    """Random weights, where a drafter needs some and none came with the package."""
    target = open_llm(drafter="none").engine.target
    return {} if files.find(drafter, target) else artefacts.settings(drafter, target)


CASES = [
    pytest.param(
        drafter,
        fields,
        id=f"{name}-{drafter}",
        marks=[pytest.mark.slow] if drafter not in ("ngram", "small_model") and name != "greedy" else [],
    )
    for drafter in DRAFTERS
    for name, fields in FIELDS.items()
]
"""Every drafter under sampling fields is held to the plain text in test_any_architecture.py, on a tiny model."""


@pytest.fixture(scope="module")
def plainly(open_llm: Open) -> Callable[[SamplingParams], list[Result]]:
    """What plain decoding says to the prompts, once for each set of fields and not once a drafter."""
    said: dict[str, list[Result]] = {}

    def get(params: SamplingParams) -> list[Result]:
        key = repr(params)
        if key not in said:
            said[key] = open_llm(drafter="none").generate(PROMPTS, params)
        return said[key]

    return get


@pytest.mark.parametrize(("drafter", "fields"), CASES)
def test_every_field_gives_the_same_text_with_every_drafter(
    open_llm: Open, plainly: Callable[[SamplingParams], list[Result]], drafter: str, fields: dict
) -> None:
    """Alone and in a batch; ids, text, reason, logprobs and counts."""
    params = SamplingParams(**{"max_tokens": 20, "seed": 5, "logprobs": 2, **fields})
    plain = plainly(params)
    guessed = open_llm(drafter=drafter, depth=4, adaptive=False, **weights_for(drafter, open_llm))
    batch = guessed.generate(PROMPTS, params)
    place = list(FIELDS.values()).index(fields) % len(PROMPTS)  # so that each prompt is alone under some fields
    (alone,) = guessed.generate(PROMPTS[place], params)
    # Penalties and noise may leave a lookup nothing to find; greedy text repeats itself soon enough.
    assert sum(result.tally.drafted for result in batch) > 0 or (drafter == "ngram" and fields)
    for expected, found in [*zip(plain, batch, strict=True), (plain[place], alone)]:
        assert found.token_ids == expected.token_ids
        assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
        assert found.logprobs == expected.logprobs
        assert found.completion_tokens == len(found.token_ids) == len(found.logprobs or ())
        assert found.tally.cycles == 0 or found.tally.tau == pytest.approx(
            (found.completion_tokens - 1) / found.tally.cycles
        )


@pytest.mark.parametrize("depth", [1, 8, 20, 32])
def test_depth_changes_nothing(open_llm: Open, plainly: Callable[[SamplingParams], list[Result]], depth: int) -> None:
    params = SamplingParams(max_tokens=48)
    plain = plainly(params)[1:3]
    deep = open_llm(drafter="ngram", depth=depth, width=2, adaptive=False).generate(PROMPTS[1:3], params)
    assert [r.token_ids for r in deep] == [r.token_ids for r in plain]


@pytest.mark.parametrize("width", [2, 4])
def test_trees_of_a_model_change_nothing(
    open_llm: Open, plainly: Callable[[SamplingParams], list[Result]], width: int
) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=3)
    plain = plainly(params)
    trees = open_llm(drafter="small_model", depth=3, width=width, adaptive=False).generate(PROMPTS, params)
    assert [r.token_ids for r in trees] == [r.token_ids for r in plain]
    # The small model is the target itself, so under shared noise the first candidate is always right.
    assert sum(r.tally.accepted for r in trees) > 0.5 * sum(r.tally.cycles for r in trees)


def reference(model, tokenizer, prompt: str, max_tokens: int) -> list[int]:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=max_tokens, do_sample=False)
    return out[0, ids["input_ids"].shape[1] :].tolist()


def compare_with_transformers(llm: LLM, prompts: list[str], max_tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    from outrider.models.loader import locate

    source = locate(llm.config.model)
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    for prompt in prompts:
        expected = reference(model, llm.tokenizer, prompt, max_tokens)
        (found,) = llm.generate(prompt, SamplingParams(max_tokens=max_tokens))
        assert list(found.token_ids) == expected, prompt


def test_greedy_ids_equal_transformers_in_float32(open_llm: Open) -> None:
    compare_with_transformers(open_llm(drafter="ngram", dtype="float32"), PROMPTS[:2], 24)


TOPICS = ["rivers", "the moon", "bread", "bicycles", "bees", "glass", "maps", "tea", "snow", "music"]
ASKS = [
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "Write a Python function whose subject is {}.",
    "Write one paragraph on the history of {}.",
]


@pytest.mark.slow
def test_greedy_ids_equal_transformers_for_fifty_prompts(open_llm: Open) -> None:
    prompts = [ask.format(topic) for topic in TOPICS for ask in ASKS]
    compare_with_transformers(open_llm(drafter="ngram", dtype="float32"), prompts, 64)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65, 130])
def test_prompt_logprobs_cold_cached_and_across_chunks(open_llm: Open, drafter: str, length: int) -> None:
    """Equal whether the prompt's keys are there or not, in one chunk or many; asking for them changes no text."""
    llm = open_llm(drafter=drafter, max_rows=64)
    prompt = [(7 * length + 31 * i) % 40000 + 100 for i in range(length)]
    silent = SamplingParams(max_tokens=4)
    telling = replace(silent, prompt_logprobs=2)
    (cold,) = llm.generate([prompt], telling, raw=True)
    (warm,) = llm.generate([prompt], telling, raw=True)
    (text,) = llm.generate([prompt], silent, raw=True)
    assert cold.prompt_logprobs is not None
    assert cold.prompt_logprobs == warm.prompt_logprobs
    assert cold.token_ids == warm.token_ids == text.token_ids
    assert text.cached_tokens == (length - 1) // 16 * 16
    assert [row and row.token for row in cold.prompt_logprobs] == [None, *prompt[1:]]
    for row in cold.prompt_logprobs[1:]:
        assert row is not None
        assert sum(torch.tensor([logprob for _, logprob in row.top]).exp()) <= 1


def test_logprobs_of_one_change_no_neighbour(open_llm: Open) -> None:
    llm = open_llm(drafter="ngram")
    quiet = SamplingParams(max_tokens=16, temperature=1.0, seed=1)
    alone = llm.generate(PROMPTS, quiet)
    mixed = llm.generate(PROMPTS, [quiet, replace(quiet, logprobs=5, prompt_logprobs=1), quiet, quiet])
    assert [r.token_ids for r in alone] == [r.token_ids for r in mixed]


def test_a_bursting_stop_string_ends_ids_text_and_logprobs_together(open_llm: Open) -> None:
    llm = open_llm(drafter="small_model", depth=6, adaptive=False)
    free = SamplingParams(max_tokens=40, logprobs=0)
    (whole,) = llm.generate(PROMPTS[0], free)
    stop = whole.text[25:31]
    (cut,) = llm.generate(PROMPTS[0], replace(free, stop=(stop, "never there")))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: cut.completion_tokens]
    assert stop in llm.prompts.decode(cut.token_ids)
    assert stop not in llm.prompts.decode(cut.token_ids[:-1])
    assert len(cut.logprobs or ()) == cut.completion_tokens
    assert cut.finish_reason == "stop"


def test_a_stream_is_the_same_text(open_llm: Open) -> None:
    llm = open_llm(drafter="small_model", depth=6, adaptive=False)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=8)
    deltas = list(llm.stream(PROMPTS[3], params))
    (whole,) = llm.generate(PROMPTS[3], params)
    assert "".join(delta.text for delta in deltas) == whole.text == deltas[-1].result.text
    assert sum((delta.token_ids for delta in deltas), ()) == whole.token_ids


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(open_llm: Open) -> None:
    llm = open_llm(drafter="ngram")
    (free,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20))
    stop = free.token_ids[9]
    params = SamplingParams(max_tokens=20, stop_token_ids=(stop,))
    (cut,) = llm.generate(PROMPTS[0], params)
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert cut.text == llm.prompts.decode(cut.token_ids[:-1])
    assert "".join(delta.text for delta in llm.stream(PROMPTS[0], params)) == cut.text


def test_a_stream_that_is_left_early_gives_its_slots_back(open_llm: Open) -> None:
    llm = open_llm(drafter="ngram")
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=40))
    next(stream)
    stream.close()
    assert llm.engine.scheduler.is_idle
    assert llm.engine.ledger.pool.num_held == 0


def test_a_grammar_reaches_every_node(open_llm: Open) -> None:
    """Only tokens 10 and 11 in turn, three times, then the end: with trees of a model that knows nothing of it."""
    end = 2
    steps = {i: {10 + i % 2: i + 1} for i in range(6)}
    automaton = TokenAutomaton(0, {**steps, 6: {end: 7}, 7: None})
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=0, automaton=automaton)
    for drafter in ("none", *DRAFTERS):
        settings = {} if drafter == "none" else {"depth": 4, "width": 2, "adaptive": False}
        settings |= weights_for(drafter, open_llm)
        (result,) = open_llm(drafter=drafter, **settings).generate(PROMPTS[0], params)
        assert result.token_ids == (10, 11, 10, 11, 10, 11, end)


def test_forbidden_tokens_never_appear(open_llm: Open) -> None:
    """Fault 6: a banned token in 250 draws at depth 5, under noise that would often choose it."""
    llm = open_llm(drafter="small_model", depth=5, adaptive=False)
    (free,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))
    banned = free.token_ids[0]
    params = SamplingParams(temperature=1.0, logit_bias={banned: -100.0}, max_tokens=16, n=16, seed=1)
    results = llm.generate(PROMPTS[0], params)
    assert all(banned not in result.token_ids for result in results)


@pytest.mark.parametrize("acceptance", [pytest.param("match", marks=pytest.mark.slow), "rejection"])
def test_the_law_of_the_first_tokens_is_that_of_plain_decoding(open_llm: Open, acceptance: str) -> None:
    """Fault 9: one prompt many times at T = 1; counts of the second and third token against plain decoding's."""
    prompt, count = "The colour of the sky is", 160
    counts = []
    for drafter, seed in (("none", 0), ("early_exit", 10**6)):
        settings = {} if drafter == "none" else {"depth": 3, "adaptive": False, "acceptance": acceptance}
        llm = open_llm(drafter=drafter, **settings)
        params = [SamplingParams(temperature=1.0, max_tokens=4, seed=seed + i) for i in range(count)]
        results = llm.generate([prompt] * count, params, raw=True)
        counts.append(Counter(token for r in results for token in enumerate(r.token_ids[1:])))
    common = [token for token, number in (counts[0] + counts[1]).items() if number >= 12]
    table = [[c[token] for token in common] + [sum(c.values()) - sum(c[t] for t in common)] for c in counts]
    assert len(common) >= 5
    assert chi2_contingency(table).pvalue > 1e-3


def test_what_speculation_may_not_change_silently(open_llm: Open) -> None:
    """Fault 35: every resolved setting but the drafter's own is the same with speculation off."""
    off, on = (open_llm(drafter=name).describe() for name in ("none", "ngram"))
    own = {"drafter", "depth", "nodes", "adaptive", "reasons", "pass_seconds", "memory", "start"}
    assert {k: v for k, v in off.items() if k not in own} == {k: v for k, v in on.items() if k not in own}
    assert off["memory"]["slots"] == on["memory"]["slots"]


def test_samples_differ_and_repeat(open_llm: Open) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, seed=4)
    first, again = (open_llm(drafter="ngram").generate(PROMPTS[0], params) for _ in range(2))
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert len({r.token_ids for r in first}) == 3


def test_a_seed_that_was_drawn_repeats_the_text(open_llm: Open) -> None:
    llm = open_llm(drafter="none")
    (first,) = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=12))
    (again,) = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=12, seed=first.seed))
    assert first.token_ids == again.token_ids


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("", "empty"), ([], "empty"), ([10**6], "ids lie in"), ([1, -1], "ids lie in"), ([5] * 9000, "shorten")],
)
def test_bad_prompts_are_refused_in_one_sentence(open_llm: Open, prompt: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        open_llm(drafter="none").generate([prompt], raw=True)  # type: ignore[list-item]
