"""The match rule's walk against `sampling.verify`, and the compaction of its paths against `Pages.compact`."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.pages import Pages, PageSpec
from outrider.kernels.tree import PageTable, Trees, Walks
from outrider.sampling.context import Context
from outrider.sampling.verify import verify
from outrider.tree import DraftTree
from tests.kernels.conftest import make as make_kernels
from tests.laws import DrawKernels, make, random_tree

VOCAB = 5


@pytest.fixture(scope="module", params=["plain", "triton"])
def kernels(request):
    return make_kernels(request.param)


def flat(trees: list[DraftTree], starts: list[int]) -> Trees:
    """The trees side by side, on this device."""
    first = [0]
    for tree in trees:
        first.append(first[-1] + len(tree))
    return Trees(
        torch.tensor([token for tree in trees for token in tree.tokens], dtype=torch.int64),
        torch.tensor([parent for tree in trees for parent in tree.parents], dtype=torch.int32),
        torch.tensor(first, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        max(map(len, trees)),
        max([0, *(depth for tree in trees for depth in tree.depths())]),
    )


def a_pass(rng: random.Random, num_requests: int) -> tuple[list[DraftTree], list[int], list[int]]:
    """Trees, the row of each root, and draws of all rows that often follow a tree; some have no law."""
    trees, starts, draws = [], [], [7]
    for _ in range(num_requests):
        tree = random_tree(rng, VOCAB, rng.choice([1, 4, 12]))
        starts.append(len(draws))
        for node in range(-1, len(tree)):
            liked = [tree.tokens[child] for child in tree.children(node)]
            lawless = rng.random() < 0.1
            draws.append(-1 if lawless else rng.choice(liked) if liked and rng.random() < 0.8 else rng.randrange(VOCAB))
        trees.append(tree)
    return trees, starts, draws


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_requests=st.integers(1, 4))
def test_walks_end_where_verdicts_do(kernels, seed, num_requests):
    trees, starts, draws = a_pass(random.Random(seed), num_requests)
    logits = torch.full((len(draws), VOCAB), -1.0)
    for row, token in enumerate(draws):
        logits[row] = torch.nan if token < 0 else logits[row]
        logits[row, token % VOCAB] = torch.nan if token < 0 else 3.0
    contexts = [Context(make(i), VOCAB) for i in range(num_requests)]
    verdicts = verify(trees, logits, contexts, DrawKernels(), starts=starts)
    whole = flat(trees, starts)
    walks = kernels.walk(torch.tensor(draws), whole)
    for request, verdict in enumerate(verdicts):
        count = int(walks.counts[request])
        path, said = walks.paths[request].tolist(), walks.said[request].tolist()
        if isinstance(verdict, Exception):
            assert (count, set(path), set(said)) == (0, {-1} & set(path), {-1})
            continue
        assert path == [*verdict.path, *[-1] * (whole.depth - count)]
        assert said == [*verdict.tokens, *[-1] * (whole.depth - count)]


def test_plain_decoding_has_nothing_to_walk(kernels):
    walks = kernels.walk(torch.tensor([4, 9, -1]), flat([DraftTree(), DraftTree(), DraftTree()], [1, 0, 2]))
    assert walks.counts.tolist() == [0, 0, 0]
    assert walks.paths.shape == (3, 0)
    assert walks.said.tolist() == [[9], [4], [-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "specs", [[PageSpec(2, 8, 8)] * 3, [PageSpec(1, 3, 5), PageSpec(3, 40, 70)]], ids=["even", "odd"]
)
def test_a_path_moves_as_by_pages(kernels, specs, dtype):
    """Whatever is accepted, in every layer; a slot that is a source and a target is read before it is written."""
    for seed in range(6):
        rng = random.Random(seed)
        trees = [DraftTree.chain([1, 2, 3, 4]), DraftTree(), random_tree(rng, VOCAB, 12), random_tree(rng, VOCAB, 7)]
        whole = flat(trees, [0] * 4)
        slots = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[: len(whole.tokens)].int()
        chosen = [trees[r].path(rng.randrange(len(trees[r]))) if len(trees[r]) else [] for r in range(4)]
        rows = [[*path, *[-1] * (whole.depth - len(path))] for path in chosen]
        counts = torch.tensor(list(map(len, chosen)), dtype=torch.int32)
        walks = Walks(counts, torch.tensor(rows, dtype=torch.int32), torch.zeros(4, whole.depth + 1, dtype=torch.int64))
        pages, expected = (Pages(specs, 40, dtype, torch.device("cpu")) for _ in range(2))
        for ours, theirs in zip([*pages.keys, *pages.values], [*expected.keys, *expected.values], strict=True):
            ours.copy_(torch.randn(ours.shape))
            theirs.copy_(ours)
        first = whole.first.tolist()
        source = [int(slots[first[r] + node]) for r, path in enumerate(chosen) for node in path]
        target = [int(slots[first[r] + place]) for r, path in enumerate(chosen) for place in range(len(path))]
        expected.compact(source, target)
        kernels.compact(PageTable.of([*pages.keys, *pages.values]), slots, whole, walks)
        for ours, theirs in zip([*pages.keys, *pages.values], [*expected.keys, *expected.values], strict=True):
            assert torch.equal(ours, theirs)
