"""Fault 5: the law that a drafter reports is the one it drew from, and the request's own warps shaped it."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from scipy.stats import kstest

from outrider.models.heads import files
from outrider.registry import CASCADES, DRAFTERS, NEED_WEIGHTS
from outrider.request import SamplingParams
from tests import artefacts, reference_heads, toy
from tests.contracts.test_drafters import requests, spied

LAYERS = {"small_model": 2, f"small_model{toy.OTHER_WORDS}": 2, "early_exit": 1}
"""Drafters that draw from the toy's own layers, and how many they run."""
DRAWING = [*LAYERS, *NEED_WEIGHTS]
TOP_K, TOP_P = 8, 0.9
CHECKED = 0.05
"""Share of the laws of draft heads that are compared: their specification in dense PyTorch takes its time."""


@functools.cache
def trained(name: str) -> tuple[files.Artefact, reference_heads.World]:
    target = toy.ToyTarget()
    artefact = files.read(files.locate(artefacts.folder(name, target)))
    cos, sin = target.model.rotary()
    head = target.model.head.lookup(torch.arange(toy.VOCAB))
    return artefact, reference_heads.World(target.model.embedding, head, cos, sin, dim=1, eps=1e-5)


def draft_logits(name: str, known: list[int], path: list[int]) -> torch.Tensor:
    """(V,) float64, -inf for what the drafter does not know."""
    if name in LAYERS:
        return toy.law([*known, *path], LAYERS[name]).double()
    artefact, world = trained(name)
    taps = [
        torch.stack([toy.tap(bytes(known[: i + 1]), layer) for i in range(len(known))])
        for layer in artefact.config["taps"]
    ]
    found = getattr(reference_heads, name)(artefact, world, known, taps, path)
    logits = torch.full((toy.VOCAB,), -torch.inf, dtype=torch.float64)
    logits[artefact.kept_ids()] = found[0] if isinstance(found, tuple) else found
    return logits


def golden(name: str, known: list[int], path: list[int], temperature: float) -> torch.Tensor:
    """Softmax, the best eight, then the smallest set of them that holds 0.9 of their mass: by sorting, step by step."""
    chances = torch.softmax(draft_logits(name, known, path) / temperature, 0)
    best = chances.argsort(descending=True)[:TOP_K]
    share = chances[best] / chances[best].sum()
    kept = best[(share.cumsum(0) - share) < TOP_P]
    law = torch.zeros_like(chances)
    law[kept] = chances[kept] / chances[kept].sum()
    return law


def test_the_others_report_point_masses() -> None:
    for name in DRAFTERS.keys() - set(DRAWING):
        engine, spy = spied(name, acceptance="rejection")
        toy.run(engine, requests(temperature=1.0, max_tokens=80))
        assert any(len(tree) for _, tree in spy.asked)
        assert all(tree.laws is None for _, tree in spy.asked)


CASES = [
    *((name, heat) for name in DRAWING for heat in (0.3, 1.7)),
    # At T = 1 tests/engine/test_same_text.py holds the texts of each to their law, through the whole engine.
    *(pytest.param(name, 1.0, marks=pytest.mark.slow) for name in DRAWING),
    *((name, 1.0) for name in CASCADES),
]


@pytest.mark.parametrize(("name", "temperature"), CASES)
def test_children_are_drawn_from_the_law_that_is_reported(name: str, temperature: float) -> None:
    """Every child's place in the running sum of its law, without its elder siblings, is uniform over many draws."""
    engine, spy = spied(name, depth=3, width=2, acceptance="rejection", blocks=400)
    rng = random.Random(0)
    params = [
        SamplingParams(temperature=temperature, top_k=TOP_K, top_p=TOP_P, max_tokens=12, seed=i)
        for i in range(50 if name in NEED_WEIGHTS else 120)
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
    places, compared = [], 0
    for ask, tree in spy.asked:
        (text,) = known[id(ask)]
        for parent in range(-1, len(tree)):
            path = [] if parent < 0 else [tree.tokens[node] for node in tree.path(parent)]
            if not tree.children(parent) or tree.laws is None:  # a cascade's first guesses may be point masses
                continue
            left = tree.laws[tree.children(parent)[0]].double()
            if name in LAYERS or (name in NEED_WEIGHTS and rng.random() < CHECKED):
                torch.testing.assert_close(left, golden(name, text, path, temperature), atol=2e-5, rtol=1e-3)
                compared += 1
            left /= left.sum()
            for child in tree.children(parent):
                assert torch.equal(tree.laws[child], tree.laws[tree.children(parent)[0]])
                token = tree.tokens[child]
                places.append(float(left[:token].sum() + rng.random() * left[token]))
                left[token] = 0
                left /= left.sum().clamp(min=1e-300)
    assert len(places) > (1000 if name in DRAWING else 100)
    assert compared > 15 or name in CASCADES
    assert kstest(places, "uniform").pvalue > 1e-3
