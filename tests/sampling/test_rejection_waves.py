"""The rejection rule in waves: the very verdicts and guesses of one request, one node and one child at a time."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.noise import coins
from outrider.sampling import rejection
from outrider.sampling.automaton import TokenAutomaton
from outrider.sampling.context import Context
from outrider.sampling.rejection import KeyedChoices, draft_siblings, verify_rejection
from outrider.sampling.verify import verify
from outrider.tree import ROOT, DraftTree
from tests.laws import DrawKernels, ToyModel, make, random_tree
from tests.sampling import one_by_one

VOCAB = 9
MODEL = ToyModel(VOCAB)
EVEN = TokenAutomaton("any", {"any": dict.fromkeys(range(0, VOCAB, 2), "any")})
FIELDS = [
    {},
    {"temperature": 0.6},
    {"top_k": 3, "repetition_penalty": 1.3},
    {"temperature": 1.4, "frequency_penalty": 1.0, "top_p": 0.8},
    {"automaton": EVEN},
    {"min_tokens": 3, "end_ids": (0, 1)},
    {"automaton": TokenAutomaton(0, {0: {1: 0}}), "min_tokens": 9, "end_ids": (1,)},  # forbids everything
]


def near(rng, logits):
    """A drafter's law near the target's, of any scale; sometimes no law at all."""
    if rng.random() < 0.1:
        return torch.full((VOCAB,), rng.choice([math.nan, 0.0, math.inf]))
    noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(rng.getrandbits(40)))
    q = torch.softmax(logits + rng.choice([0.0, 0.5, 2.0]) * noise, 0) * rng.choice([1.0, 3.0])
    return q * (torch.arange(VOCAB) != 4) if rng.random() < 0.2 else q  # a token that the drafter lacks


def drawn_tree(rng, request, sequence):
    """Up to four levels drawn from laws near the target's; a family in ten is of tokens that the law did not draw."""
    tokens, parents, laws, paths = [], [], [], {ROOT: ()}
    for node in range(ROOT, rng.randint(ROOT, 12)):
        if node not in paths or len(paths[node]) > 3:
            continue
        q = near(rng, MODEL.logits((*sequence, *paths[node])))
        num = rng.randint(0, 3)
        family = one_by_one.draft_siblings(q, num, request.seed, request.sample, len(request.output), node)
        if not family or rng.random() < 0.1:
            family = rng.sample(range(VOCAB), num)
        for token in family:
            paths[len(tokens)] = (*paths[node], token)
            tokens.append(token)
            parents.append(node)
            laws.append(q)
    return DraftTree(tuple(tokens), tuple(parents), torch.stack(laws) if laws else None)


def batch(rng, num):
    """Requests of all fields in the middle of their texts, trees of all kinds, here and there a row of NaN."""
    trees, contexts, rows = [], [], []
    for index in range(num):
        fields = {"temperature": 1.0, **rng.choice(FIELDS)}
        request = make(
            index, prompt=(rng.randrange(VOCAB), 3), seed=rng.getrandbits(64), sample=rng.randrange(3), **fields
        )
        request.output.extend(rng.randrange(0, VOCAB, 2) for _ in range(rng.randrange(3)))
        sequence = (*request.prompt, *request.output)
        tree = random_tree(rng, VOCAB, 8) if rng.random() < 0.3 else drawn_tree(rng, request, sequence)
        logits = MODEL.rows(sequence, tree).clone()
        if rng.random() < 0.2:
            logits[rng.randrange(len(logits)), rng.randrange(VOCAB)] = rng.choice([math.nan, math.inf])
        trees.append(tree)
        contexts.append(Context(request, VOCAB))
        rows.append(logits)
    return trees, contexts, rows


def same(verdict, expected):
    if isinstance(expected, Exception):
        return type(verdict) is type(expected) and str(verdict) == str(expected)
    return verdict == expected


@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([1, 3, 64]))
@settings(max_examples=200, deadline=None)
def test_every_verdict_is_that_of_one_request_one_node_one_child_at_a_time(seed, num, size):
    trees, contexts, rows = batch(random.Random(seed), num)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection, "CACHED", 8 * VOCAB * size)  # in parts of so many requests
        verdicts = verify(trees, torch.cat(rows), contexts, DrawKernels(), "rejection")
    for verdict, tree, context, logits in zip(verdicts, trees, contexts, rows, strict=True):
        assert same(verdict, one_by_one.reject(tree, logits, context))


def test_the_batches_hold_what_they_shall():
    """Without these the comparison would say little."""
    lengths, errors, early = [], set(), 0
    for seed in range(40):
        trees, contexts, rows = batch(random.Random(seed), 8)
        for tree, context, logits in zip(trees, contexts, rows, strict=True):
            verdict = one_by_one.reject(tree, logits, context)
            if isinstance(verdict, Exception):
                errors.add(type(verdict).__name__)
            else:
                lengths.append(len(verdict.path))
                early += len(verdict.path) < len(tree) and not torch.isfinite(logits).all()
    assert errors == {"NumericsError", "RequestError"}
    assert max(lengths) >= 3
    assert sum(length > 0 for length in lengths) > 80
    assert early


@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_siblings_are_those_of_one_draw_at_a_time(seed, num):
    rng = random.Random(seed)
    laws = torch.stack([near(rng, MODEL.logits((rng.randrange(VOCAB),))) for _ in range(num)])
    nums, nodes = [rng.randint(0, 5) for _ in range(num)], [rng.randint(ROOT, 30) for _ in range(num)]
    keys = [(rng.getrandbits(64), rng.randrange(3), rng.randrange(5000)) for _ in range(num)]
    found = draft_siblings(laws, nums, keys, nodes)
    assert found.shape == (num, max(nums))
    for row, *asked in zip(found.tolist(), laws, nums, keys, nodes, strict=True):
        law, count, key, node = asked
        tokens = one_by_one.draft_siblings(law, count, *key, node)
        assert row == [*tokens, *[-1] * (max(nums) - len(tokens))]


class Watched(KeyedChoices):
    """Counts what the host reads."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.waves, self.picks = [], 0

    def accept(self, trees, nodes, ratios):
        self.waves.append(list(zip(trees, nodes, strict=True)))
        return super().accept(trees, nodes, ratios)

    def pick(self, nodes, weights):
        self.picks += 1
        return super().pick(nodes, weights)


def test_a_wave_holds_a_coin_of_every_walk_and_laws_are_asked_where_walks_arrive():
    rng, asked = random.Random(5), []
    trees, contexts, rows = batch(rng, 30)
    rows = [torch.nan_to_num(logits, 0.0, 0.0) for logits in rows]

    def laws(numbers, nodes):
        asked.append(list(zip(numbers, nodes, strict=True)))
        return torch.stack([torch.softmax(rows[n][node + 1].double(), 0) for n, node in asked[-1]])

    choices = Watched(trees, [(c.request.seed, c.request.sample, c.position) for c in contexts])
    verdicts = verify_rejection(trees, laws, choices)
    coins_of = [0] * len(trees)
    for wave in choices.waves:
        assert len({number for number, _ in wave}) == len(wave)
        for number, _ in wave:
            coins_of[number] += 1
    assert len(choices.waves) == max(coins_of) > 3  # the longest walk's coins, not the sum of levels and siblings
    assert choices.picks == 1
    reached = [(n, node) for n, verdict in enumerate(verdicts) for node in (ROOT, *verdict.path)]
    assert sorted(place for wave in asked for place in wave) == sorted(reached)
    assert len(asked) <= len(choices.waves) + 1


def test_coins_of_a_walk_do_not_depend_on_the_trees_beside_it():
    keys = [(7, 0, 3), (8, 1, 0)]
    ratios = torch.tensor([0.5], dtype=torch.float64)
    small, large = DraftTree.chain([1, 2]), DraftTree.chain(range(9))
    weights = torch.full((2, 50), 0.02, dtype=torch.float64)
    alone, beside = KeyedChoices([small], keys[:1]), KeyedChoices([small, large], keys)
    for node in range(2):
        assert alone.accept([0], [node], ratios).equal(beside.accept([0], [node], ratios))
        assert alone.pick([node], weights[:1])[0] == beside.pick([node, ROOT], weights)[0]
    assert coins(keys, [2])[0, 0, 0] == one_by_one.scalars(*keys[0], 2, 1)[0]


def test_no_trees():
    assert verify_rejection([], lambda numbers, nodes: torch.zeros(0, VOCAB), KeyedChoices([], [])) == []
