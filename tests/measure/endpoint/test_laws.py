"""Laws from the likeliest tokens are the engine's own, wherever those decide them, and None where they do not."""

from __future__ import annotations

import math
import random

import pytest
import torch

from outrider.measure.endpoint.laws import Fields, Law, Laws, told, warped
from outrider.sampling.context import Context
from outrider.sampling.warp import law, warp
from outrider.tree import DraftTree
from tests.laws import make

VOCAB, TOP = 60, 20
CASES = [
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.15},
    {"frequency_penalty": 1.2},
    {"presence_penalty": 1.2},
    {"temperature": 0.7, "top_k": 7, "presence_penalty": 0.5},
]


def top_of(logits: torch.Tensor) -> dict[str, float]:
    values, ids = logits.double().log_softmax(0).topk(TOP)
    return {str(int(i)): float(value) for i, value in zip(ids, values, strict=True)}


@pytest.mark.parametrize("given", CASES, ids=str)
def test_against_the_engines_own_law(given) -> None:
    rng, decided = random.Random(3), 0
    for seed in range(40):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
        output = [rng.randrange(VOCAB) for _ in range(4)]
        request = make(**{"temperature": 1.0, **given})
        request.output.extend(output)
        context = Context(request, VOCAB)
        expected = law(warp(logits, context.rows(DraftTree())[0]), context.temperature)
        found = warped(told(top_of(logits)), Fields(**given), [str(token) for token in output])
        if found is None:
            continue
        decided += 1
        assert sum(found.known.values()) + found.tail == pytest.approx(1)
        for token, chance in found.known.items():
            assert chance == pytest.approx(float(expected[int(token)]), abs=found.doubt + 1e-5)
        inside = {int(token) for token in found.known}
        outside = sum(float(expected[i]) for i in range(VOCAB) if i not in inside)
        assert outside == pytest.approx(found.tail, abs=found.doubt + 1e-5)
        if found.tail == 0:
            assert list(found.known.values()) == sorted(found.known.values(), reverse=True)
    assert decided > 20


@pytest.mark.parametrize(
    ("fields", "top"),
    [
        ({"top_k": 5}, {"a": 0.4, "b": 0.3}),  # the third to fifth are not told
        ({"top_k": 1}, {"a": 0.5, "b": 0.5}),  # a tie at the cut
        ({"top_p": 0.9}, {"a": 0.4, "b": 0.3}),
        ({"top_p": 0.4}, {"a": 0.4, "b": 0.3}),  # right on the edge
        ({"min_p": 0.5}, {"a": 0.4, "b": 0.3}),  # more of the tail may be over the bar
        ({"temperature": 1.5}, {"a": 0.4, "b": 0.3}),
        ({"presence_penalty": -1.0}, {"a": 0.4, "b": 0.3}),
    ],
    ids=str,
)
def test_what_the_likeliest_do_not_decide_is_none(fields, top) -> None:
    assert warped(told({t: math.log(p) for t, p in top.items()}), Fields(**fields), ["z"]) is None


def test_a_tail_that_may_shrink_is_a_doubt() -> None:
    found = warped(told({"a": math.log(0.8), "b": math.log(0.1)}), Fields(temperature=0.5))
    assert found is not None
    assert 0 < found.doubt <= 0.1 * 0.1 / 0.64


def test_one_history_has_one_law() -> None:
    laws = Laws()
    for chance in (0.5, 0.5, 0.51, 0.7):
        laws.add((0, ("a", "b")), Law({"x": chance, "y": 1 - chance}, 0.0))
    assert (laws.repeated, len(laws.problems)) == (3, 1)
    assert "'ab'" in laws.problems[0]


def test_chances_that_vanish_decide_nothing() -> None:
    law = Law({"a": 1e-300, "b": 1e-310}, 0.5)
    assert warped(law, Fields(temperature=0.01)) is None
    assert warped(law, Fields(temperature=0.01, top_p=0.5)) is None
