"""Bits of the target's stack, on lean models with the native kernels: guesses and company leave no trace in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.drafters.base import Ask, Drafter
from outrider.engine.scheduler import key_of
from outrider.errors import KernelError
from outrider.request import Request
from outrider.tree import ROOT, DraftTree
from tests.e2e.test_any_architecture import open_llm, save
from tests.models.tiny_gguf import write_model

MODELS = ["float32", "bfloat16", "packed"]
PROMPTS = {
    "short": (5, 6, 7),
    "plain": (9, 8, 7, 6, 5),
    "long": tuple(range(10, 55)),
    "other": (30, 3, 30, 3, 30, 3, 30, 3),
}


def settings(name: str) -> SamplingParams:
    heat = {"temperature": 1.0, "seed": 5} if name == "other" else {}
    return SamplingParams(max_tokens=24, ignore_eos=True, speculation=name != "plain", **heat)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> str:
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "packed":
        write_model(folder / "model.gguf")
        return str(folder / "model.gguf")
    return save(folder, "qwen3", getattr(torch, request.param))


class Oracle(Drafter):
    """Knows the text: the last of `width` siblings is right at every level, or, where `is_right` is false, none is."""

    name = "oracle"

    def __init__(self, texts: dict[tuple[int, ...], list[int]], vocab_size: int, is_right: bool) -> None:
        self.texts, self.vocab_size, self.is_right = texts, vocab_size, is_right

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [self._tree(ask) for ask in asks]

    def _tree(self, ask: Ask) -> DraftTree:
        said = len(ask.request.output)
        tokens, parents, parent = [], [], ROOT
        for truth in self.texts[ask.request.prompt][said : said + ask.budget.depth]:
            room = min(ask.budget.width, ask.budget.nodes - len(tokens))
            siblings = [(truth + step) % self.vocab_size for step in range(1, room + 1)]
            if self.is_right and siblings:
                siblings[-1] = truth
            tokens += siblings
            parents += [parent] * room
            parent = len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parents))


def open_native(model: str, **shape) -> LLM:
    try:
        llm = open_llm(model, kernels="native", drafter="ngram", self_test=False, adaptive=False, **shape)
    except KernelError as error:
        pytest.skip(f"no native kernels here: {error}")
    assert llm.resolved.way == "lean"
    return llm


def stacks(
    llm: LLM, names: Sequence[str], later: Sequence[str] = ()
) -> dict[str, tuple[list[int], list[torch.Tensor]]]:
    """Text and last seen stack over [0, committed) of each request; those in `later` join in the middle."""
    engine, found = llm.engine, {}
    requests = {name: Request(i, PROMPTS[name], settings(name), 5, limit=24) for i, name in enumerate(names)}
    for name, request in requests.items():
        if name not in later:
            engine.add(request)
    mixed = cycles = 0
    while not engine.scheduler.is_idle:
        _, record = engine.step()
        cycles += 1
        if cycles == 2:
            for name in later:
                engine.add(requests[name])
        mixed += bool(record.prefill_rows and {cycle.drafted > 0 for cycle in record.cycles} == {True, False})
        for name, request in requests.items():
            if not request.is_finished and request in engine.scheduler.running:
                span = engine.ledger[key_of(request)]
                slots = engine.ledger.slots(key_of(request), 0, span.committed)
                found[name] = request.output, [t[slots].clone() for t in (*engine.pages.keys, *engine.pages.values)]
    assert mixed or not later, "no cycle mixed prompts, plain rows and trees"
    return found


def assert_equal_stacks(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, (text, stack) in found.items():
        assert text == expected[name][0]
        for ours, golden in zip(stack, expected[name][1], strict=True):
            shortest = min(len(ours), len(golden))
            assert shortest > len(PROMPTS[name])
            assert torch.equal(ours[:shortest], golden[:shortest]), name


@pytest.fixture(scope="module")
def plain(model: str) -> dict:
    """Each request alone, without a guess: once a model, as nobody writes to what was found."""
    alone = {}
    for name in PROMPTS:
        llm = open_native(model, depth=0)
        alone |= stacks(llm, [name])
        assert all(request_text for request_text, _ in alone.values())
    return alone


@pytest.mark.parametrize("is_right", [False, True], ids=["all rejected", "all accepted"])
@pytest.mark.parametrize("width", [1, 3])
def test_guesses_leave_no_trace(model: str, plain: dict, is_right: bool, width: int) -> None:
    """Fault 13, and an accepted path that has to be moved into line."""
    llm = open_native(model, depth=4, width=width)
    texts = {PROMPTS[name]: text for name, (text, _) in plain.items()}
    llm.engine.drafter = Oracle(texts, llm.engine.target.vocab_size, is_right)
    assert_equal_stacks(stacks(llm, list(PROMPTS)), plain)


def test_a_cycle_of_prompt_chunks_plain_rows_and_trees(model: str, plain: dict) -> None:
    """Fault 29."""
    llm = open_native(model, depth=3, width=2, max_rows=13)
    texts = {PROMPTS[name]: text for name, (text, _) in plain.items()}
    llm.engine.drafter = Oracle(texts, llm.engine.target.vocab_size, True)
    assert_equal_stacks(stacks(llm, list(PROMPTS), later=["long", "other"]), plain)
