"""On a GPU: the rejection rule has the verdicts and the guesses that it has on a CPU."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.sampling.context import Context
from outrider.sampling.rejection import draft_siblings
from outrider.sampling.verify import verify
from outrider.tree import ROOT, DraftTree
from tests.laws import DrawKernels, make
from tests.sampling.test_rejection_waves import batch, same

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def moved(tree: DraftTree) -> DraftTree:
    return DraftTree(tree.tokens, tree.parents, None if tree.laws is None else tree.laws.to(GPU))


@pytest.mark.parametrize("seed", range(20))
def test_verdicts_of_all_kinds_of_requests(seed):
    """Sums differ in their last bits there, which no coin is likely to meet."""
    trees, contexts, rows = batch(random.Random(seed), 16)
    logits = torch.cat(rows)
    there = [Context(context.request, logits.shape[1], GPU) for context in contexts]
    expected = verify(trees, logits, contexts, DrawKernels(), "rejection")
    found = verify([moved(tree) for tree in trees], logits.to(GPU), there, DrawKernels(), "rejection")
    assert all(same(*pair) for pair in zip(found, expected, strict=True))


def test_trees_over_a_large_vocabulary():
    generator = torch.Generator().manual_seed(1)
    size, num = 49_152, 24
    contexts = [Context(make(n, seed=n, temperature=1.0), size) for n in range(num)]
    logits = 3 * torch.randn(num, 4, size, generator=generator)
    q = torch.softmax(logits[:, 0] + 0.5 * torch.randn(num, size, generator=generator), 1)
    keys = [(context.request.seed, 0, 0) for context in contexts]
    tokens = draft_siblings(q, [3] * num, keys, [ROOT] * num)
    assert draft_siblings(q.to(GPU), [3] * num, keys, [ROOT] * num).tolist() == tokens.tolist()
    trees = [DraftTree(tuple(row), (ROOT,) * 3, law.expand(3, -1)) for row, law in zip(tokens.tolist(), q, strict=True)]
    there = [Context(context.request, size, GPU) for context in contexts]
    expected = verify(trees, logits.flatten(0, 1), contexts, DrawKernels(), "rejection")
    found = verify([moved(tree) for tree in trees], logits.flatten(0, 1).to(GPU), there, DrawKernels(), "rejection")
    assert found == expected
    assert any(verdict.path for verdict in expected)
