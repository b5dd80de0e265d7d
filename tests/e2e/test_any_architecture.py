"""The whole engine over tiny random models of many architectures: same text with every drafter and device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError, ModelError, RequestError
from outrider.registry import DRAFTERS
from tests import artefacts
from tests.models.tiny import VOCAB, make_module, make_tokenizer
from tests.models.tiny_gguf import write_model

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]
NAMES = ("mistral", "gpt_oss", "llama", "qwen3", "gemma2", "gpt2", "opt", "mixtral", "deepseek_v3")
FAST = (("mistral", "float32"), ("mistral", "bfloat16"), ("gpt_oss", "bfloat16"))
"""The lean way in both types, and the module's; the slow tests take the others."""
CASES = [
    pytest.param(
        name, getattr(torch, dtype), id=f"{name}-{dtype}", marks=() if (name, dtype) in FAST else pytest.mark.slow
    )
    for name in NAMES
    for dtype in ("float32", "bfloat16")
]


def save(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, vocab: int = VOCAB, **settings) -> str:
    """A folder with random weights and a tokenizer of `vocab` words."""
    make_module(name, dtype, **settings).save_pretrained(folder)
    make_tokenizer(vocab).save_pretrained(folder)
    return str(folder)


def open_llm(model: str, **settings) -> LLM:
    return LLM(model, **{"num_slots": 2048, "threads": 1, "max_context": 96, **settings})


def prompts(count: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 40, (5 + 9 * i,), generator=generator).tolist() for i in range(count)]


PARAMS = [
    SamplingParams(max_tokens=10, logprobs=1),
    SamplingParams(max_tokens=10, logprobs=1, temperature=1.0, seed=3, top_p=0.9, frequency_penalty=0.5),
]


def texts(llm: LLM, params: SamplingParams, alone: Sequence[int] = range(3)) -> list:
    """What is said to all prompts together; those of `alone` are also asked by themselves."""
    asked = [[*prompt, *prompt[:4]] for prompt in prompts()]  # so that a lookup has something to find
    batch = llm.generate(asked, params, raw=True)
    assert [r.error for r in batch] == [None] * len(asked)
    for place in alone:
        (own,) = llm.generate([asked[place]], params, raw=True)
        assert (own.token_ids, own.logprobs) == (batch[place].token_ids, batch[place].logprobs)
    return [(r.token_ids, r.logprobs) for r in batch]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_drafter_gives_the_plain_text(tmp_path, name: str, dtype: torch.dtype, device: str) -> None:
    model = save(tmp_path, name, dtype)
    plain = open_llm(model, drafter="none", device=device)
    assert plain.resolved.exactness == "seed"
    expected = [texts(plain, params) for params in PARAMS]
    for number, drafter in enumerate(DRAFTERS):  # in turns: each prompt is alone under some of them
        own = artefacts.settings(drafter, plain.engine.target)
        llm = open_llm(model, drafter=drafter, device=device, depth=3, width=2, adaptive=False, self_test=False, **own)
        found = [texts(llm, params, [(number + place) % 3]) for place, params in enumerate(PARAMS)]
        assert found == expected, drafter


@pytest.mark.parametrize("kernels", ["native", "plain"])
def test_both_kernel_sets_serve_the_lean_way(tmp_path, kernels: str) -> None:
    model = save(tmp_path)
    plain = open_llm(model, drafter="none", kernels=kernels)
    guessed = open_llm(model, drafter="small_model", kernels=kernels, depth=3, adaptive=False)
    assert plain.resolved.way == "lean"
    assert [texts(plain, params) for params in PARAMS] == [texts(guessed, params) for params in PARAMS]


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1], ids=str)
def test_a_quantised_target_at_every_batch_width(tmp_path, kind: Kind) -> None:
    """Fault 2: 1 to 9 and 64 requests at once, with guesses and without."""
    write_model(tmp_path / "model.gguf", kind)
    plain = open_llm(str(tmp_path / "model.gguf"), drafter="none", self_test=False)
    assert plain.resolved.dtype == "packed"
    guessed = open_llm(
        str(tmp_path / "model.gguf"), drafter="early_exit", depth=3, adaptive=False, self_test=False, num_slots=8192
    )
    params = [SamplingParams(max_tokens=8, temperature=i % 2, seed=i, ignore_eos=True) for i in range(64)]
    asked = [[3 + i % 60, *range(5, 6 + i % 11)] for i in range(64)]
    solo = [plain.generate([prompt], own, raw=True)[0].token_ids for prompt, own in zip(asked, params, strict=True)]
    for width in (*range(1, 10), 64):
        for llm in (plain, guessed):
            batch = llm.generate(asked[:width], params[:width], raw=True)
            assert [result.token_ids for result in batch] == solo[:width], (llm.resolved.drafter, width)


def test_two_bos_tokens_are_refused(tmp_path) -> None:
    """Fault 34: a chat template that writes a BOS of its own before the tokenizer's."""
    llm = open_llm(save(tmp_path), drafter="none", self_test=False)
    llm.tokenizer.bos_token = "w1"
    with pytest.raises(RequestError, match="two BOS"):
        llm.generate([[1, 1, 5]], raw=True)
    llm.tokenizer.chat_template = "{{ 'w1 w1 ' + messages[0]['content'] }}"
    llm.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(RequestError, match="two BOS"):
        llm.generate("w5")


def test_padded_vocabularies_of_one_tokenizer_work(tmp_path) -> None:
    """Fault 24: embeddings of 128 rows, 100 words; the drafter's are padded otherwise. No id of the padding appears."""
    target = save(tmp_path / "target", vocab=100)
    small = save(tmp_path / "small", vocab=100, vocab_size=112, num_hidden_layers=1)
    params = SamplingParams(max_tokens=30, temperature=5.0, seed=0, n=8)
    plain = open_llm(target, drafter="none").generate(prompts(), params, raw=True)
    settings = {"depth": 3, "width": 2, "adaptive": False, "self_test": False}
    guessed = open_llm(target, drafter_model=small, **settings).generate(prompts(), params, raw=True)
    assert [r.token_ids for r in plain] == [r.token_ids for r in guessed]
    assert max(token for r in plain for token in r.token_ids) < 100


def test_a_foreign_tokenizer_is_refused_by_its_first_differing_id(tmp_path) -> None:
    """Fault 25."""
    target = save(tmp_path / "target")
    foreign = save(tmp_path / "small")
    file = Path(foreign) / "tokenizer.json"
    file.write_text(re.sub(r'"w57"', '"other"', file.read_text()))
    with pytest.raises(ModelError, match="id 57"):
        open_llm(target, drafter_model=foreign)


def test_a_drafter_at_chance_is_stopped_by_the_probe(tmp_path) -> None:
    """Fault 34: a model of the same vocabulary that was trained for something else."""
    target = save(tmp_path / "target")
    module = make_module("llama", num_hidden_layers=1)
    with torch.no_grad():
        # It always says word 99, whatever it reads; the target, as random as it is, hardly ever does.
        module.lm_head.weight.zero_()
        module.model.norm.weight.zero_()
        module.lm_head.weight[99] = 0
    module.save_pretrained(tmp_path / "small")
    make_tokenizer().save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match="chance"):
        open_llm(target, drafter_model=str(tmp_path / "small"))


def test_settings_that_would_do_nothing_are_refused(tmp_path) -> None:
    model = save(tmp_path)
    for settings, words in (
        ({"drafter": "ngram", "drafter_model": model}, "drafter_model"),
        ({"drafter": "ngram", "exit_layers": 1}, "exit_layers"),
        ({"drafter": "early_exit", "exit_layers": 3}, "3 layers"),
        ({"max_context": 97}, "96 positions"),
        ({"detph": 3}, "did you mean 'depth'"),
        ({"drafter": "n-gram"}, "did you mean 'ngram'"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_llm(model, **settings)


def test_a_refused_request_leaves_none_of_its_call_behind(tmp_path) -> None:
    llm = open_llm(save(tmp_path), drafter="ngram", self_test=False)
    with pytest.raises(RequestError, match="logit_bias"):
        llm.generate(prompts(2), [SamplingParams(), SamplingParams(logit_bias={VOCAB: 1.0})], raw=True)
    assert llm.engine.scheduler.is_idle


def test_streams_that_share_their_passes_miss_nothing(tmp_path) -> None:
    llm = open_llm(save(tmp_path), drafter="small_model", depth=3, adaptive=False, self_test=False)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    whole = llm.generate(prompts(2), params, raw=True)
    streams = [llm.stream(prompt, params, raw=True) for prompt in prompts(2)]
    deltas = [[next(stream)] for stream in streams]
    llm.generate([[5, 6]], SamplingParams(max_tokens=30, ignore_eos=True), raw=True)  # both streams end within
    for stream, taken, expected in zip(streams, deltas, whole, strict=True):
        taken += stream
        assert "".join(delta.text for delta in taken) == expected.text
        assert [delta.result for delta in taken[:-1]] == [None] * (len(taken) - 1)
        assert taken[-1].result is not None
        assert taken[-1].result.token_ids == expected.token_ids
    assert llm.engine.ledger.pool.num_held == 0


def test_small_memory_and_many_requests_change_no_text(tmp_path) -> None:
    """Requests lose their slots and start again; every text equals its solo run (faults 16, 26, 27)."""
    model = save(tmp_path)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=2)
    asked = [prompt for prompt in prompts(4) for _ in range(3)]
    roomy = open_llm(model, drafter="none").generate(asked, params, raw=True)
    tight = open_llm(model, drafter="small_model", depth=4, num_slots=160, max_context=96, max_rows=24)
    assert [r.token_ids for r in tight.generate(asked, params, raw=True)] == [r.token_ids for r in roomy]


def test_slots_that_hold_no_request_are_refused(tmp_path) -> None:
    model = save(tmp_path)
    for num_slots in (1, 16, 47):
        with pytest.raises(ConfigError, match="raise it to 48 or more"):
            open_llm(model, num_slots=num_slots, max_context=None)
    small = open_llm(model, num_slots=48, max_context=None)
    assert small.resolved.max_context == 16
    assert small.generate([[5, 6, 7]], raw=True)[0].completion_tokens == 13


@pytest.fixture(scope="module")
def shared_llm(tmp_path_factory) -> LLM:
    return open_llm(save(tmp_path_factory.mktemp("llama")), depth=3, adaptive=False, self_test=False)


def test_threads_share_one_engine(shared_llm) -> None:
    """Each gets its own text, from `generate` as from `stream`, and no slot stays behind."""
    params = SamplingParams(max_tokens=12)
    asked = [[5, 6, 7, 5, 6, 7, 5, last] for last in range(3, 11)]
    expected = [shared_llm.generate([prompt], params)[0].token_ids for prompt in asked]

    def ask(place: int) -> tuple[int, ...]:
        if place % 2:
            return shared_llm.generate([asked[place]], params)[0].token_ids
        deltas = list(shared_llm.stream(asked[place], params))
        assert deltas[-1].result is not None
        return tuple(token for delta in deltas for token in delta.token_ids)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == expected
    assert shared_llm.engine.scheduler.is_idle
    assert shared_llm.engine.ledger.pool.num_held == 0


def test_a_forgotten_stream_that_is_collected_within_a_step_is_dropped_after_it(shared_llm, monkeypatch) -> None:
    forgotten = [shared_llm.stream([5, 6, 7])]
    next(forgotten[0])
    collect = shared_llm.engine.collect

    def collecting(flight):
        forgotten.clear()
        return collect(flight)

    monkeypatch.setattr(shared_llm.engine, "collect", collecting)
    assert shared_llm.generate([[5, 6]], SamplingParams(max_tokens=4))[0].completion_tokens == 4
    assert shared_llm.engine.scheduler.is_idle


@pytest.mark.parametrize("prompt", [np.array([5, 6, 7]), torch.tensor([5, 6, 7]), [np.int64(5), 6, 7], range(5, 8)])
def test_ids_may_come_in_any_sequence(shared_llm, prompt) -> None:
    params = SamplingParams(max_tokens=3)
    (expected,) = shared_llm.generate([[5, 6, 7]], params)
    assert [r.token_ids for r in shared_llm.generate(prompt, params)] == [expected.token_ids]
    assert [r.token_ids for r in shared_llm.generate((p for p in [prompt] * 2), params)] == [expected.token_ids] * 2


@pytest.mark.parametrize(
    "prompts",
    [None, 5, b"text", {"role": "user"}, [None], ["w1", 5], [1.0], [[1.0]], [True], "\ud800", ["w1", "\ud800"]],
)
def test_what_is_no_prompt_is_refused_in_a_sentence(shared_llm, prompts) -> None:
    with pytest.raises(RequestError):
        shared_llm.generate(prompts)
    assert shared_llm.engine.scheduler.is_idle


@pytest.mark.parametrize("params", [5, "text", {"temperature": 1}, ["text"]])
def test_what_are_no_params_is_refused_in_a_sentence(shared_llm, params) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        shared_llm.generate([[5, 6]], params)
