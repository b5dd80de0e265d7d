"""Best-first growth against exhaustive search, prices, trimmed vocabularies, and what is learned from the outcome."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.base import Ask, Commit
from outrider.drafters.candidates import Candidates
from outrider.drafters.trees import Level, Trees, best_nodes, lines_first, shares
from outrider.request import SamplingParams
from outrider.sampling.context import Context
from outrider.tree import ROOT, Budget
from tests import toy

VOCAB = toy.VOCAB


def law(path: tuple[int, ...], columns: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    return torch.randn(columns, generator=generator) * 2


class Asker:
    """Grows trees from `law` for one request, and counts the nodes that are expanded."""

    def __init__(self, acceptance: str = "match", kept: list[int] | None = None, columns: int = VOCAB, **params):
        self.request = toy.make_request(0, [1, 2], SamplingParams(seed=5, **params))
        self.context = Context(self.request, VOCAB)
        ids = None if kept is None else torch.tensor(kept)
        self.trees = Trees(Candidates(toy.ToyKernels(), VOCAB, ids), acceptance)
        self.columns = columns
        self.kept = kept
        self.levels: list[Level] = []

    def logits(self, path: tuple[int, ...]) -> torch.Tensor:
        logits = law(path, VOCAB)
        return logits[: self.columns] if self.kept is None else logits[self.kept]

    def grow(self, budget: Budget, **options):
        paths: list[tuple[int, ...]] = [()]
        self.levels = []

        def expand(level: Level):
            nonlocal paths
            self.levels.append(level)
            paths = [(*paths[origin], token) for origin, token in zip(level.origins, level.tokens, strict=True)]
            return torch.stack([self.logits(path) for path in paths]), options.get("doubts")

        ask = Ask(self.request, self.context, budget)
        (tree,) = self.trees.grow([ask], self.logits(()).unsqueeze(0), expand, options.get("trust"))
        assert tree.fault(VOCAB) is None
        return tree


def paths_of(tree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))}


@st.composite
def weighted_trees(draw):
    """(parents, path weights) of up to eight nodes."""
    parents: list[int] = []
    weights: list[float] = []
    for node in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(ROOT, node - 1))
        above = 1.0 if parent == ROOT else weights[parent]
        parents.append(parent)
        weights.append(above * draw(st.sampled_from([0.05, 0.3, 0.5, 0.9, 1.0])))
    return parents, weights


@given(weighted_trees(), st.integers(1, 9), st.lists(st.floats(0, 0.6), max_size=4))
@settings(max_examples=200, deadline=None)
def test_no_subtree_is_worth_more_than_the_chosen_one(tree, nodes, prices) -> None:
    """Against every subset that is closed under parents; rows of a pass never get cheaper."""
    parents, weights = tree
    budget = Budget(8, 8, nodes, tuple(sorted(prices)))

    def worth(chosen) -> float:
        return sum(weights[node] for node in chosen) - sum(budget.price(i) for i in range(len(chosen)))

    chosen = best_nodes(weights, budget)
    assert all(parents[node] == ROOT or parents[node] in chosen[:place] for place, node in enumerate(chosen))
    best = max(
        worth(subset)
        for size in range(min(nodes, len(weights)) + 1)
        for subset in itertools.combinations(range(len(weights)), size)
        if all(parents[node] == ROOT or parents[node] in subset for node in subset)
    )
    assert worth(chosen) == pytest.approx(best)
    if not prices:
        assert len(chosen) == min(nodes, len(weights))


@pytest.mark.parametrize("nodes", [1, 5, 12, 30])
def test_a_tree_holds_the_likeliest_paths_of_all(nodes: int) -> None:
    """Without a limit to its width the tree is the `nodes` likeliest of all paths, by the product of q."""
    columns, depth = 3, 3
    asker = Asker(columns=columns)
    tree = asker.grow(Budget(depth, 27, nodes))
    chances: dict[tuple[int, ...], float] = {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(columns), repeat=length):
            q = torch.softmax(asker.logits(path[:-1]).double(), 0)
            chances[path] = chances.get(path[:-1], 1.0) * float(q[path[-1]])
    ranked = sorted(chances, key=lambda path: -chances[path])
    assert paths_of(tree) == set(ranked[:nodes])
    line = [tuple(tree.tokens[i] for i in tree.path(n)) for n in range(len(tree))][:depth]
    best = [next((path for path in ranked[:nodes] if path[:-1] == above), None) for above in [(), *line[: depth - 1]]]
    assert line[: len(tree)] == [path for path in best if path is not None][: len(line)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("depth", "width", "nodes"), [(6, 1, 6), (4, 1, 2), (5, 3, 15), (3, 2, 4)])
def test_without_prices_the_budget_is_used_up(temperature: float, depth: int, width: int, nodes: int) -> None:
    asker = Asker(temperature=temperature)
    tree = asker.grow(Budget(depth, width, nodes))
    assert len(tree) == nodes
    assert width > 1 or tree.is_chain
    assert all(len(level.tokens) <= width for level in asker.levels)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
def test_nodes_and_levels_that_do_not_pay_are_left_out(params) -> None:
    asker = Asker(**params)
    full = asker.grow(Budget(8, 2, 16))
    levels = len(asker.levels)
    some = asker.grow(Budget(8, 2, 16, prices=(0.0, 0.3)))
    assert 0 < len(some) < len(full)
    assert paths_of(some) < paths_of(full)
    assert len(asker.levels) < levels
    shallow = asker.grow(Budget(8, 2, 16, prices=(0.0,), level_price=5.0))
    assert (len(asker.levels), max(shallow.depths())) == (0, 1)
    assert len(asker.grow(Budget(8, 2, 16, prices=(1.1,)))) == 0


def test_doubt_lowers_weights() -> None:
    asker = Asker()
    sure = asker.grow(Budget(3, 1, 3, prices=(0.2,)))
    assert len(asker.grow(Budget(3, 1, 3, prices=(0.2,)), trust=[0.01])) < len(sure)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"logit_bias": {4: 5.0, 7: 9.0}},
        {"temperature": 0.7, "top_k": 4, "presence_penalty": 1},
    ],
)
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("width", [1, 3])
def test_a_trimmed_vocabulary_is_the_whole_one_without_the_rest(params, acceptance: str, width: int) -> None:
    """Fault 10: equal trees and equal laws, whether a token has no column or a column of -inf."""
    kept = [0, 2, 3, 4, 8, 9, 13, 20, 22]
    trimmed, whole = Asker(acceptance, kept=kept, **params), Asker(acceptance, **params)
    mask = torch.full((VOCAB,), -math.inf)
    mask[kept] = 0.0
    whole.logits = lambda path: law(path) + mask  # type: ignore[method-assign]
    a, b = (asker.grow(Budget(4, width, 4 * width)) for asker in (trimmed, whole))
    assert a == b
    assert len(a) > 1
    assert set(a.tokens) <= set(kept)
    if acceptance == "rejection" and params.get("temperature"):
        torch.testing.assert_close(a.laws, b.laws)


def test_columns_beyond_the_vocabulary_are_never_proposed() -> None:
    asker = Asker(temperature=1.0)
    asker.logits = lambda path: torch.cat([law(path), torch.full((9,), 50.0)])  # type: ignore[method-assign]
    assert max(asker.grow(Budget(4, 3, 12)).tokens) < VOCAB


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_row_without_a_law_has_no_children(acceptance: str, temperature: float, value: float) -> None:
    """Fault 12."""
    for width in (1, 3):
        asker = Asker(acceptance, temperature=temperature)
        fine = asker.logits
        asker.logits = lambda path, fine=fine: fine(path) if not path else torch.full((VOCAB,), value)  # type: ignore[method-assign]
        tree = asker.grow(Budget(4, width, 4 * width))
        assert max(tree.depths()) == 1


def test_children_are_shared_out_as_the_best_tree_has_them() -> None:
    rates = [0.6, 0.2, 0.1]
    weights = [0.7, 0.2, 0.05]
    for room, levels, width in itertools.product((1, 3, 6, 12), (1, 2, 3), (1, 2, 3)):
        counts = shares(weights, rates.__getitem__, Budget(9, width, room), 0, levels)
        every = [
            (math.prod((weights[index], *(rates[rank] for rank in path))), index, path)
            for index in range(3)
            for length in range(1, levels + 1)
            for path in itertools.product(range(width), repeat=length)
        ]
        every.sort(key=lambda entry: -entry[0])
        ours = sum(rate for rate, _, path in every[:room] if len(path) == 1)
        assert sum(counts) <= room
        assert sum(weights[i] * sum(rates[:n]) for i, n in enumerate(counts)) == pytest.approx(ours)


def test_weights_become_the_chances_they_stand_for() -> None:
    """A drafter that is sure of itself and mostly wrong is found out, at its own depth and rank."""
    asker = Asker(logit_bias={3: 20.0})
    rng = random.Random(0)
    budget = Budget(1, 1, 1, prices=(0.5,))
    lengths = []
    for _ in range(300):
        tree = asker.grow(budget)
        lengths.append(len(tree))
        asker.request.output.append(3 if rng.random() < 0.2 else 4)
        asker.trees.observe([Commit(asker.request, 1, 0, ())])
    assert lengths[:3] == [1, 1, 1]
    assert sum(lengths[200:]) == 0
    again = Asker(logit_bias={3: 20.0})
    for _ in range(300):
        assert len(again.grow(budget)) == 1
        again.request.output.append(3)
        again.trees.observe([Commit(again.request, 1, 0, ())])


def test_what_is_over_is_not_learned_from() -> None:
    asker = Asker(logit_bias={3: 20.0})
    for _ in range(100):
        asker.grow(Budget(1, 1, 1, prices=(0.5,)))
        asker.trees.end(asker.request)
        asker.request.output.append(4)
        asker.trees.observe([Commit(asker.request, 1, 0, ())])
    assert len(asker.grow(Budget(1, 1, 1, prices=(0.5,)))) == 1


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_the_likeliest_path_lies_in_line(picks: list[int]) -> None:
    """Nodes come in an order of weight; the first children of first children take the first places, none is lost."""
    parents = [pick % (node + 1) - 1 for node, pick in enumerate(picks)]
    nodes = [10 * node for node in range(len(picks))]
    above = [parent if parent == ROOT else 10 * parent for parent in parents]
    order = lines_first(nodes, above)
    assert sorted(order) == nodes
    place = {node: index for index, node in enumerate(order)} | {ROOT: -1}
    for node, parent in zip(nodes, above, strict=True):
        siblings = [other for other, its in zip(nodes, above, strict=True) if its == parent]
        assert place[node] > place[parent]
        assert [place[other] for other in siblings] == sorted(place[other] for other in siblings)
        assert node != siblings[0] or place[node] == place[parent] + 1
