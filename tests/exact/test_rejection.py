"""The rejection rule by exhaustive enumeration: every guess, every coin, every residual, over several cycles."""

import functools
import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from explore import Explored, explore, extend

from outrider.kernels import noise
from outrider.sampling.context import Context
from outrider.sampling.rejection import KeyedChoices, draft_siblings, invert, verify_rejection
from outrider.sampling.warp import law, warp
from outrider.tree import ROOT, DraftTree
from tests.laws import ToyModel, make

# By level: children of every node there. A tuple a level: by rank of the parent among its siblings.
SHAPES = {
    "plain": [],
    "chain of 1": [1],
    "chain of 3": [1, 1, 1],
    "siblings": [2],
    "more siblings than tokens": [4],
    "tree": [2, 1],
    "pruned tree": [2, (1, 0)],
    "deep tree": [2, (1, 0), 1],
    "wide below": [1, 2],
}
WARPS = {
    "none": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 2},
    "top_p and penalties": {"temperature": 1.3, "top_p": 0.8, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
    "min_p and bias": {"temperature": 1.0, "min_p": 0.25, "logit_bias": {0: 0.8}},
}


def target_law(model, params, text):
    """The warped law after `text`, each time from scratch."""
    request = make(prompt=(0,), **params)
    request.output.extend(text)
    context = Context(request, model.vocab_size)
    return law(warp(model.logits((0, *text)), context.rows(DraftTree())[0]), context.temperature)


def grow(choose, shape, q, text, keep=lambda token, law: True):
    """Draw a tree level by level, siblings without replacement; `keep` may drop a node after seeing it."""
    tokens, parents, laws = [], [], []
    level = [(ROOT, text, 0)]
    for counts in shape:
        following = []
        for parent, path, rank in level:
            q_here = q(path)
            left = q_here.tolist()
            for sibling in range(counts if isinstance(counts, int) else counts[rank] if rank < len(counts) else 0):
                if sum(left) == 0:
                    break
                token = choose(left)
                left[token] = 0.0
                if keep(token, q_here):
                    following.append((len(tokens), (*path, token), sibling))
                    tokens.append(token)
                    parents.append(parent)
                    laws.append(q_here)
        level = following
    return DraftTree(tuple(tokens), tuple(parents), torch.stack(laws) if laws else None)


def one_cycle(text, choose, p, propose):
    """What a cycle adds after `text`, through the real walk."""
    tree = propose(choose, text)

    def laws_at(trees, nodes):
        return torch.stack([p((*text, *(tree.tokens[i] for i in tree.path(node)))) for node in nodes])

    (verdict,) = verify_rejection([tree], laws_at, Explored(choose))
    return verdict.tokens


def text_law(p, propose, length):
    @functools.cache
    def cycle(text):
        return explore(lambda choose: one_cycle(text, choose, p, propose))

    return extend(cycle, length)


def largest_error(p, got, vocab_size, length):
    assert math.isclose(sum(got.values()), 1, abs_tol=1e-12)
    worst = 0.0
    for text in itertools.product(range(vocab_size), repeat=length):
        exact = math.prod(float(p(text[:i])[token]) for i, token in enumerate(text))
        worst = max(worst, abs(got.get(text, 0.0) - exact))
    return worst


def laws_of(vocab_size, warp_name="none", disturbance=1.0):
    target = ToyModel(vocab_size, seed=1, scale=1.0)
    noise_model = ToyModel(vocab_size, seed=2, scale=disturbance)
    p = functools.lru_cache(maxsize=None)(functools.partial(target_law, target, WARPS[warp_name]))
    return p, lambda text: torch.softmax(target.logits((0, *text)) + noise_model.logits((0, *text)), 0)


@pytest.mark.parametrize("warp_name", WARPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("vocab_size", "length"), [(2, 4), (3, 3)])
def test_text_has_the_law_of_plain_sampling(shape, warp_name, vocab_size, length):
    p, q = laws_of(vocab_size, warp_name)
    got = text_law(p, lambda choose, text: grow(choose, SHAPES[shape], q, text), length)
    assert largest_error(p, got, vocab_size, length) < 1e-9  # the drafter's laws are float32


@pytest.mark.parametrize("shape", ["chain of 1", "siblings", "tree"])
def test_four_tokens(shape):
    p, q = laws_of(4, "top_k")
    got = text_law(p, lambda choose, text: grow(choose, SHAPES[shape], q, text), 2)
    assert largest_error(p, got, 4, 2) < 1e-9


@pytest.mark.parametrize("shape", ["chain of 3", "siblings", "tree"])
def test_a_drafter_of_fewer_tokens(shape):
    """Fault 10: what the drafter cannot say comes from the residual alone."""
    p, q = laws_of(3)

    def narrow(text):
        law_ = q(text).clone()
        law_[1] = 0.0
        return law_ / law_.sum()

    got = text_law(p, lambda choose, text: grow(choose, SHAPES[shape], narrow, text), 3)
    assert largest_error(p, got, 3, 3) < 1e-9


POINT_MASSES = [
    DraftTree.chain([0, 1, 0]),
    DraftTree((2, 0, 1), (-1, -1, -1)),
    DraftTree((1, 2, 0, 0, 1), (-1, -1, 0, 1, 1)),
]


@pytest.mark.parametrize("warp_name", WARPS)
@pytest.mark.parametrize("tree", POINT_MASSES)
def test_candidates_without_a_law_are_point_masses(tree, warp_name):
    p, _ = laws_of(3, warp_name)
    got = text_law(p, lambda choose, text: tree, 3)
    assert largest_error(p, got, 3, 3) < 1e-12


ONE_HOT = torch.tensor([0.0, 1.0, 0.0])
EDGES = {
    "all NaN": lambda p: torch.full((3,), torch.nan),
    "zero for the guess": lambda p: torch.tensor([0.0, 0.4, 0.6]),
    "zero everywhere": lambda p: torch.zeros(3),
    "p = q": lambda p: p.float(),
    "q off the support of p": lambda p: torch.tensor([1.0, 0.0, 0.0]),
    "one-hot q": lambda p: ONE_HOT,
    "unnormalised": lambda p: torch.tensor([3.0, 1.0, 4.0]),
}


@pytest.mark.parametrize("target", [[0.5, 0.2, 0.3], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.7, 0.3]])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("guesses", [(0, 2), (2, 0)])
def test_edges_yield_a_draw_from_p(edge, guesses, target):
    """Fault 12. A law that could not have drawn a guess says nothing of the others either."""
    p = torch.tensor(target, dtype=torch.float64)
    q = EDGES[edge](p)

    def propose(choose, text):
        if bool((q >= 0).all()) and float(q.sum()) > 0 and edge != "zero for the guess":
            return grow(choose, [2], lambda path: q, text)
        return DraftTree(guesses, (-1, -1), torch.stack([q, q]))

    got = text_law(lambda text: p, propose, 2)
    assert largest_error(lambda text: p, got, 3, 2) < 1e-7  # float32 rounding of p = q


def test_dropping_a_sibling_after_seeing_it_biases_the_law():
    """Why counts are fixed first: the same enumeration with a tree that drops unlikely nodes is far off."""
    p, q = laws_of(3)

    def pruned(choose, text):
        return grow(choose, [2, 1], q, text, keep=lambda token, law: law[token] > 0.3)

    assert largest_error(p, text_law(p, pruned, 2), 3, 2) > 1e-2


def test_two_trees_walked_together_have_the_law_of_each_alone():
    """Every outcome of both: they meet in waves, and nothing of one enters the other."""
    p, q = laws_of(3)

    def both(choose, texts):
        trees = [grow(choose, [2], q, texts[0]), grow(choose, [1, 1], q, texts[1])]

        def laws_at(numbers, nodes):
            paths = [trees[number].path(node) for number, node in zip(numbers, nodes, strict=True)]
            told = [(*texts[n], *(trees[n].tokens[i] for i in path)) for n, path in zip(numbers, paths, strict=True)]
            return torch.stack([p(text) for text in told])

        return tuple(verdict.tokens for verdict in verify_rejection(trees, laws_at, Explored(choose)))

    got = explore(lambda choose: both(choose, ((), (1,))))
    alone = [
        explore(lambda choose: one_cycle((), choose, p, lambda choose, text: grow(choose, [2], q, text))),
        explore(lambda choose: one_cycle((1,), choose, p, lambda choose, text: grow(choose, [1, 1], q, text))),
    ]
    assert math.isclose(sum(got.values()), 1, abs_tol=1e-12)
    for first, second in itertools.product(*alone):
        assert math.isclose(got.get((first, second), 0.0), alone[0][first] * alone[1][second], abs_tol=1e-12)


def test_the_door_fixes_the_count_before_it_draws():
    """Only numbers go in, every child drawn comes out, and a larger number changes no earlier child."""
    assert list(inspect.signature(draft_siblings).parameters) == ["laws", "nums", "keys", "nodes"]
    generator = torch.Generator().manual_seed(0)
    for position in range(200):
        q = torch.rand(6, generator=generator) * (torch.rand(6, generator=generator) > 0.4)
        support = int((q > 0).sum())
        drawn = drafted(q.expand(8, -1), range(8), [(7, 0, position)] * 8, [ROOT] * 8)
        for num, tokens in enumerate(drawn):
            assert len(tokens) == min(num, support)
            assert tokens == drawn[7][:num]
            assert len(set(tokens)) == len(tokens)
            assert all(q[token] > 0 for token in tokens)
    assert drafted(torch.full((1, 6), torch.nan), [3], [(7, 0, 0)], [ROOT]) == [()]


def drafted(laws, nums, keys, nodes):
    """The children of each node, without what fills up the rows."""
    rows = draft_siblings(laws, list(nums), keys, nodes).tolist()
    return [tuple(token for token in row if token >= 0) for row in rows]


@pytest.mark.parametrize("weights", [(1, 2, 3), (0, 5, 0), (4, 0, 0, 3), (1, 1, 1, 1), (0, 0, 7)])
def test_inversion_hits_every_token_exactly_its_share_of_the_time(weights):
    cells = 12 * sum(weights)
    uniforms = [(k + 0.5) / cells for k in range(cells)] + [0.5 * 2.0**-52, 1 - 2.0**-53]
    rows = torch.tensor(weights, dtype=torch.float64).expand(len(uniforms), -1)
    *drawn, least, most = invert(rows, torch.tensor(uniforms, dtype=torch.float64)).tolist()
    assert [drawn.count(token) for token in range(len(weights))] == [12 * weight for weight in weights]
    assert weights[least] > 0
    assert weights[most] > 0


@pytest.mark.parametrize("row", [[0.0, 0.0], [math.nan, math.nan], [0.5, math.nan]])
def test_inversion_of_no_law_names_no_token(row):
    rows = torch.tensor([[0.25, 0.75], row], dtype=torch.float64)
    assert invert(rows, torch.tensor([0.5, 0.5], dtype=torch.float64)).tolist() == [1, -1]


def test_no_two_draws_share_a_counter(monkeypatch):
    """Fault 4: draft, acceptance and residual over cycles, nodes and siblings, and the match rule's noise beside."""
    blocks = []

    def recording(counter, key):
        columns = np.broadcast_arrays(*counter, *key)
        blocks.extend(zip(*(column.flatten().tolist() for column in columns), strict=True))
        return philox(counter, key)

    philox = noise.philox4x32
    monkeypatch.setattr(noise, "philox4x32", recording)
    keys = [(5, sample, cycle) for sample, cycle in itertools.product(range(2), (0, 1, 2, 255, 256, 257, 65536))]
    for node in range(ROOT, 40):
        draft_siblings(torch.full((len(keys), 5), 0.2), [4] * len(keys), keys, [node] * len(keys))
    num_drafted = len(blocks)
    assert num_drafted == len(keys) * 41 * 2  # two coins a block
    KeyedChoices([DraftTree.chain(range(40))] * len(keys), keys)
    assert len(blocks) - num_drafted == len(keys) * (40 + 41)
    assert len(set(blocks)) == len(blocks)
    last_words = {block[3] for block in blocks}
    assert noise.stream(noise.Purpose.MATCH) not in last_words
    assert {word & 0xFF for word in last_words} == {noise.Purpose.DRAFT, noise.Purpose.ACCEPT, noise.Purpose.RESIDUAL}
