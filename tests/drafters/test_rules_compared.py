"""Shared noise against rejection without replacement on one topology: with siblings, no fewer are accepted."""

from __future__ import annotations

import functools

import pytest
import torch

from outrider.drafters.candidates import Candidates, Place
from outrider.request import SamplingParams
from outrider.sampling.context import Context
from outrider.sampling.verify import verify
from outrider.tree import ROOT, DraftTree
from tests import toy

SEEDS = 1200


@functools.cache
def laws(path: tuple[int, ...], disturbance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of target and drafter after a path: the drafter's are the target's, disturbed."""
    generator = torch.Generator().manual_seed(sum((token + 1) * 97**i for i, token in enumerate(path)) + 1)
    target = torch.randn(toy.VOCAB, generator=generator) * 2.5
    return target, target + torch.randn(toy.VOCAB, generator=generator) * disturbance


def full_trees(
    acceptance: str, contexts: list[Context], width: int, levels: int, disturbance: float
) -> list[DraftTree]:
    """`width` children everywhere: shared noise ranks them, rejection draws them without replacement.

    A level of all trees is one call: a row's candidates hang on its own place alone.
    """
    candidates = Candidates(toy.ToyKernels(), toy.VOCAB)
    tokens: list[list[int]] = [[] for _ in contexts]
    parents: list[list[int]] = [[] for _ in contexts]
    kept: list[list[torch.Tensor]] = [[] for _ in contexts]
    paths: list[dict[int, tuple[int, ...]]] = [{ROOT: ()} for _ in contexts]
    level = [(tree, ROOT) for tree in range(len(contexts))]
    for _ in range(levels):
        below = []
        q = torch.stack([laws(paths[tree][node], disturbance)[1] for tree, node in level])
        places = [Place(contexts[tree], paths[tree][node]) for tree, node in level]
        if acceptance == "match":
            families = candidates.best(q, places, width)
        else:
            drawn = candidates.draw(q, places, [width] * len(level), [node for _, node in level])
            families = [children for children, _ in drawn]
            for (tree, _), (children, law) in zip(level, drawn, strict=True):
                kept[tree] += [law] * len(children)
        for (tree, node), children in zip(level, families, strict=True):
            for child in children:
                below.append((tree, len(tokens[tree])))
                paths[tree][len(tokens[tree])] = (*paths[tree][node], child.token)
                tokens[tree].append(child.token)
                parents[tree].append(node)
        level = below
    return [
        DraftTree(tuple(own), tuple(above), torch.stack(told) if told else None)
        for own, above, told in zip(tokens, parents, kept, strict=True)
    ]


def mean_accepted(acceptance: str, width: int, levels: int, disturbance: float) -> float:
    params = (SamplingParams(temperature=1.0, seed=seed) for seed in range(SEEDS))
    contexts = [Context(toy.make_request(0, [1], chosen), toy.VOCAB) for chosen in params]
    trees = full_trees(acceptance, contexts, width, levels, disturbance)
    paths = [tuple(tree.tokens[i] for i in tree.path(node)) for tree in trees for node in range(ROOT, len(tree))]
    logits = torch.stack([laws(path, disturbance)[0] for path in paths])
    verdicts = verify(trees, logits, contexts, toy.ToyKernels(), acceptance)  # type: ignore[arg-type]
    return sum(len(verdict.path) for verdict in verdicts) / SEEDS  # type: ignore[union-attr]


@pytest.mark.parametrize(("width", "levels"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("disturbance", [0.7, 1.5])
def test_with_siblings_shared_noise_accepts_as_many(width: int, levels: int, disturbance: float) -> None:
    shared, rejected = (mean_accepted(rule, width, levels, disturbance) for rule in ("match", "rejection"))
    assert shared > rejected - 0.03  # two standard errors of the difference; the truth lies above


@pytest.mark.parametrize("disturbance", [0.7, 1.5])
def test_a_chain_under_shared_noise_loses_little(disturbance: float) -> None:
    """At least (1 - TV) / (1 + TV) per token, at most 1 - TV, which rejection reaches."""
    target, draft = (torch.softmax(logits.double(), 0) for logits in laws((), disturbance))
    overlap = float(torch.minimum(target, draft).sum())
    shared, rejected = (mean_accepted(rule, 1, 1, disturbance) for rule in ("match", "rejection"))
    assert rejected == pytest.approx(overlap, abs=0.045)
    assert overlap / (2 - overlap) - 0.045 < shared < overlap + 0.045
