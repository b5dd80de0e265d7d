"""Fault 5: the law that a drafter reports is the one it drew from, and the request's own warps shaped it."""

from __future__ import annotations

import random

import pytest
import torch
from scipy.stats import kstest

from outrider.registry import DRAFTERS
from outrider.request import SamplingParams
from tests import toy
from tests.contracts.test_drafters import requests, spied

LAYERS = {"small_model": 2, "early_exit": 1}
"""Drafters that draw, and how many of the toy's layers they run."""
TOP_K, TOP_P = 8, 0.9


def golden(tokens: list[int], layers: int, temperature: float) -> torch.Tensor:
    """Softmax, the best eight, then the smallest set of them that holds 0.9 of their mass: by sorting, step by step."""
    chances = torch.softmax(toy.law(tokens, layers).double() / temperature, 0)
    best = chances.argsort(descending=True)[:TOP_K]
    share = chances[best] / chances[best].sum()
    kept = best[(share.cumsum(0) - share) < TOP_P]
    law = torch.zeros_like(chances)
    law[kept] = chances[kept] / chances[kept].sum()
    return law


def test_the_others_report_point_masses() -> None:
    for name in DRAFTERS.keys() - LAYERS.keys():
        engine, spy = spied(name, acceptance="rejection")
        toy.run(engine, requests(temperature=1.0, max_tokens=80))
        assert any(len(tree) for _, tree in spy.asked)
        assert all(tree.laws is None for _, tree in spy.asked)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_children_are_drawn_from_the_law_that_is_reported(name: str, temperature: float) -> None:
    """Every child's place in the running sum of its law, without its elder siblings, is uniform over many draws."""
    engine, spy = spied(name, depth=3, width=2, acceptance="rejection", blocks=400)
    rng = random.Random(0)
    params = [
        SamplingParams(temperature=temperature, top_k=TOP_K, top_p=TOP_P, max_tokens=12, seed=i) for i in range(120)
    ]
    prompts = [[rng.randrange(toy.VOCAB) for _ in range(6)] for _ in params]
    known: dict[int, list[list[int]]] = {}
    propose = spy.propose

    def noting(asks):
        for ask in asks:
            known.setdefault(id(ask), []).append([*ask.request.prompt, *ask.request.output])
        return propose(asks)

    spy.propose = noting
    toy.run(engine, [toy.make_request(i, p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))])
    places = []
    for ask, tree in spy.asked:
        (text,) = known[id(ask)]
        for parent in range(-1, len(tree)):
            path = [] if parent < 0 else [tree.tokens[node] for node in tree.path(parent)]
            left = golden([*text, *path], LAYERS[name], temperature)
            for child in tree.children(parent):
                torch.testing.assert_close(
                    tree.laws[child].double(), golden([*text, *path], LAYERS[name], temperature), atol=1e-6, rtol=1e-5
                )
                token = tree.tokens[child]
                places.append(float(left[:token].sum() + rng.random() * left[token]))
                left[token] = 0
                left /= left.sum().clamp(min=1e-300)
    assert len(places) > 1000
    assert kstest(places, "uniform").pvalue > 1e-3
