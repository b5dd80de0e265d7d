"""Rows warped by Triton's kernels against the definition, operations of PyTorch on one row at a time."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.sampling.automaton import TokenAutomaton
from outrider.sampling.context import Context
from outrider.sampling.rows import warp_rows
from outrider.sampling.warp import warp
from outrider.tree import DraftTree
from tests.kernels.conftest import make as kernels_named
from tests.laws import ToyModel, decode, make, no_guess, random_tree


@pytest.fixture(scope="module")
def triton():
    return kernels_named("triton")


def nodes(vocab_size, path=(), said=(), **params):
    """Rows along a path, after a completion."""
    request = make(prompt=(0, min(2, vocab_size - 1)), **{"temperature": 1.0, **params})
    context = Context(request, vocab_size)
    context.counts(()) if context.penalises else None
    request.output.extend(said)
    return context.rows(DraftTree.chain(list(path)))


def same(ours, logits, row):
    """The bits of the definition; of a row that holds a NaN only that it still does."""
    if logits.isnan().any() and row.context.warps(row.position):
        return bool(ours.isnan().any())
    return torch.equal(ours, warp(logits, row))


VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.5, -math.inf, 3.4e38, -3.4e38, 1e-40]), st.floats(-30, 30, width=32)
)


@settings(max_examples=15, deadline=None)
@given(
    logits=st.lists(VALUES, min_size=1, max_size=24),
    nan=st.booleans(),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.75, 0.5, 0.25, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition=st.sampled_from([1.0, 1.1, 0.5, 1e30]),
    frequency=st.sampled_from([0.0, 0.3, -2.0, 2.0]),
    presence=st.sampled_from([0.0, 0.2, -2.0]),
    data=st.data(),
)
@example([0.0] * 8, False, 1.0, 0, 0.5, 0.0, 1.0, 0.0, 0.0, None)
@example([-0.0, 0.0, 0.0, -1.0], False, 1.0, 2, 0.5, 0.0, 1.0, 0.0, 0.0, None)
@example([-math.inf] * 5, False, 1.0, 3, 0.5, 0.5, 1.0, 0.0, 0.0, None)
def test_warps_to_the_bits_of_the_definition(
    triton, logits, nan, temperature, top_k, top_p, min_p, repetition, frequency, presence, data
):
    size = len(logits)
    tokens = st.lists(st.integers(0, size - 1), max_size=4)
    said, path = (data.draw(tokens), data.draw(tokens)) if data else ([0], [])
    bias = dict.fromkeys(data.draw(tokens), -1.25) if data else {}
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "logit_bias": bias}
    penalties = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
    rows = nodes(size, path, said, **params, **penalties)
    given_logits = torch.tensor(logits).repeat(len(rows), 1)
    given_logits[-1, -1] = math.nan if nan else given_logits[-1, -1]
    before = given_logits.clone()
    ours = warp_rows(triton, given_logits, range(len(rows)), rows)
    assert torch.equal(given_logits.view(torch.int32), before.view(torch.int32))
    for number, row in enumerate(rows):
        assert same(ours[number], given_logits[number], row), (ours[number], warp(given_logits[number], row))


CASES = [
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.0},
    {"top_k": 7},
    {"top_k": 2500, "top_p": 0.95},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"top_p": 0.6, "frequency_penalty": 0.4, "bad_words": ((3, 4), (5,)), "min_tokens": 9, "end_ids": (8,)},
    {"top_p": 0.8, "automaton": TokenAutomaton(0, {0: dict.fromkeys(range(0, 2999, 3), 0)})},
    {},
]


def mixed(vocab_size):
    """Rows of requests that differ in every field, four a request, and logits: peaked, flat, of few values."""
    rows = [row for params in CASES for row in nodes(vocab_size, (3, 6, 3), (9, 3), **params)]
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(2))
    logits *= torch.tensor([0.01, 1.0, 4.0, 12.0]).repeat(len(CASES))[:, None]
    logits[1::4] = (logits[1::4] * 2).round()
    return rows, logits


def test_a_mixed_call_over_several_blocks_and_the_same_rows_in_other_company(triton):
    rows, logits = mixed(3000)
    ours = warp_rows(triton, logits, range(len(rows)), rows)
    for number, row in enumerate(rows):
        assert same(ours[number], logits[number], row), (number, CASES[number // 4])
    for part in ([21, 4], [5], [30, 29, 14, 8]):
        assert torch.equal(warp_rows(triton, logits, part, [rows[number] for number in part]), ours[part])


PARAMS = {"temperature": 1.1, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": {3: 1.5}}


GRAMMAR = TokenAutomaton(0, {0: dict.fromkeys(range(6), 1), 1: dict.fromkeys(range(3, 9), 0)})


@pytest.mark.parametrize("grammar", [None, GRAMMAR], ids=["free", "grammar"])
def test_trees_and_plain_decoding_say_the_same_under_the_kernels_warp(triton, grammar, monkeypatch):
    """Also what PyTorch's warp says; one text is long enough that its counts are brought up to date on the way."""
    monkeypatch.setattr("outrider.sampling.context.MOST_PENDING", 5)
    model, rng, texts = ToyModel(9, memory=3), random.Random(5), []
    for guess, kernels in ((no_guess, None), (no_guess, triton), (lambda request: random_tree(rng, 9, 7), triton)):
        request = make(seed=4, automaton=grammar, **PARAMS)
        decode(request, model, guess, 12, context=Context(request, 9, kernels=kernels))
        texts.append(request.output)
    assert texts[0] == texts[1] == texts[2]
