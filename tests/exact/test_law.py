"""Chi-square through the real functions: 1e5 keyed draws a rule, trees, several cycles (fault 4)."""

import functools
import itertools
import random

import numpy as np
import pytest
import scipy.stats
import torch

from outrider.kernels import noise
from outrider.sampling.context import Context
from outrider.sampling.rejection import draft_siblings
from outrider.sampling.verify import verify
from outrider.sampling.warp import law
from outrider.tree import ROOT, DraftTree
from tests.laws import ToyModel, make, random_tree

V, LENGTH = 3, 4
MODEL = ToyModel(V, seed=4, scale=1.0)


class TableKernels:
    """The draw as it is defined, for all rows at once: fast where rows are many and the vocabulary is tiny."""

    def draw(self, logits, temperature, seeds, samples, positions):
        noisy = noise.gumbel(seeds, samples, positions, logits.shape[1])
        return (logits.double() / temperature.double().unsqueeze(1) + noisy).argmax(1)


def p_value(texts, temperature):
    """Of the counts of all `V ** LENGTH` texts against the product of the target's laws."""
    every = list(itertools.product(range(V), repeat=LENGTH))
    chances = []
    for text in every:
        chance = 1.0
        for i, token in enumerate(text):
            chance *= float(law(MODEL.logits((0, *text[:i])), temperature)[token])
        chances.append(chance)
    counts = np.zeros(len(every))
    index = {text: i for i, text in enumerate(every)}
    for text in texts:
        counts[index[text]] += 1
    expected = np.array(chances) * len(texts)
    keep = expected >= 5
    observed = np.append(counts[keep], counts[~keep].sum())
    expected = np.append(expected[keep], expected[~keep].sum())
    return scipy.stats.chisquare(observed, expected).pvalue


def sample_texts(acceptance, temperature, num_texts, guess):
    """Samples of one seed, all requests in one batch, cycle after cycle."""
    open_ = [make(i, prompt=(0,), seed=2024, sample=i, temperature=temperature) for i in range(num_texts)]
    texts, cycles = [], 0
    contexts = {request.id: Context(request, V) for request in open_}
    while open_:
        trees = guess(open_)
        logits = torch.cat([MODEL.rows((0, *r.output), t) for r, t in zip(open_, trees, strict=True)])
        verdicts = verify(trees, logits, [contexts[r.id] for r in open_], TableKernels(), acceptance)
        for request, verdict in zip(open_, verdicts, strict=True):
            request.output += verdict.tokens
        texts += [tuple(r.output[:LENGTH]) for r in open_ if len(r.output) >= LENGTH]
        open_ = [r for r in open_ if len(r.output) < LENGTH]
        cycles += 1
    assert cycles > 1
    return texts


@functools.cache
def draft_law(text):
    return torch.softmax(-0.7 * MODEL.logits((0, *text)), 0)


def drawn_trees(requests):
    """Two siblings, one child below the first, from a law unlike the target's; a level of all trees in one call."""
    texts = [tuple(request.output) for request in requests]
    keys = [(request.seed, request.sample, len(text)) for request, text in zip(requests, texts, strict=True)]
    above = [draft_law(text) for text in texts]
    firsts = draft_siblings(torch.stack(above), [2] * len(texts), keys, [ROOT] * len(texts)).tolist()
    under = [draft_law((*text, first[0])) for text, first in zip(texts, firsts, strict=True)]
    belows = draft_siblings(torch.stack(under), [1] * len(texts), keys, [0] * len(texts)).tolist()
    return [
        DraftTree((*first, *below), (ROOT, ROOT, 0), torch.stack([one, one, other]))
        for first, below, one, other in zip(firsts, belows, above, under, strict=True)
    ]


def pruned_trees(requests):
    """What must never be done: the tree is dropped because of what was drawn."""
    return [tree if tree.tokens[0] == 0 else DraftTree() for tree in drawn_trees(requests)]


def guessed_trees(requests):
    return [random_tree(random.Random(f"{request.sample} {request.output}"), V, 4) for request in requests]


def test_match():
    assert p_value(sample_texts("match", 0.8, 25_000, guessed_trees), 0.8) > 1e-3


def test_match_would_be_found_out():
    assert p_value(sample_texts("match", 0.8, 4_000, guessed_trees), 0.9) < 1e-3


def test_rejection():
    """Three guesses, their coins and the last draw: about 16 keyed draws a text."""
    assert p_value(sample_texts("rejection", 0.8, 7_000, drawn_trees), 0.8) > 1e-3


@pytest.mark.slow
def test_rejection_at_length():
    assert p_value(sample_texts("rejection", 0.8, 50_000, drawn_trees), 0.8) > 1e-3


def test_rejection_would_be_found_out():
    assert p_value(sample_texts("rejection", 0.8, 1_500, pruned_trees), 0.8) < 1e-3


@pytest.mark.parametrize("num", [1, 2, 3])
def test_siblings_are_drawn_without_replacement(num):
    """Ordered draws have the Plackett-Luce law."""
    q = torch.tensor([0.5, 0.3, 0.15, 0.05])
    counts = dict.fromkeys(itertools.permutations(range(4), num), 0)
    num_draws = 6_000
    keys = [(77, 1, position) for position in range(num_draws)]
    for tokens in draft_siblings(q.expand(num_draws, -1), [num] * num_draws, keys, [2] * num_draws).tolist():
        counts[tuple(tokens)] += 1
    expected = []
    for tokens in counts:
        chance, left = 1.0, 1.0
        for token in tokens:
            chance *= float(q[token]) / left
            left -= float(q[token])
        expected.append(chance * num_draws)
    assert scipy.stats.chisquare(list(counts.values()), np.array(expected) * num_draws / sum(expected)).pvalue > 1e-3
