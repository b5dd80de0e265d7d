"""Verdicts of whole batches: each request as if alone, errors where they belong, and not a call too many."""

import math
import random

import pytest
import torch

from outrider.errors import KernelError, NumericsError, RequestError
from outrider.kernels import select
from outrider.sampling.automaton import TokenAutomaton
from outrider.sampling.context import Context
from outrider.sampling.verify import verify, verify_match
from outrider.tree import DraftTree, Verdict
from tests.laws import DrawKernels, ToyModel, decode, make, no_guess, random_tree

EVEN = TokenAutomaton("any", {"any": dict.fromkeys(range(0, 12, 2), "any")})
MIX = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.3},
    {"frequency_penalty": 1.0},
    {"temperature": 1.0, "automaton": EVEN},
    {"temperature": 1.2, "min_tokens": 4, "end_ids": (0, 1)},
]


class CountingKernels(DrawKernels):
    def __init__(self):
        self.calls = []

    def draw(self, logits, *columns):
        self.calls.append(logits)
        return super().draw(logits, *columns)


def batch(rng, acceptance, num=12):
    model = ToyModel(12)
    trees, contexts, logits = [], [], []
    for i in range(num):
        request = make(i, prompt=(i % 12, 3), seed=2**64 - 1 - i, sample=i % 3, **MIX[i % len(MIX)])
        plain = make(i, prompt=request.prompt, seed=request.seed, sample=request.sample, **MIX[i % len(MIX)])
        decode(plain, model, no_guess, 6, acceptance)
        request.output += plain.output[: i % 3]
        tree = random_tree(rng, 12, 8)
        if i % 2:  # one that is sure to be accepted in part
            tree = DraftTree.chain([*plain.output[i % 3 : i % 3 + 2], rng.randrange(12)])
        trees.append(tree)
        contexts.append(Context(request, 12))
        logits.append(model.rows((*request.prompt, *request.output), tree))
    return trees, logits, contexts


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_every_request_is_as_if_alone(acceptance):
    trees, logits, contexts = batch(random.Random(1), acceptance)
    alone = [
        verify([t], rows, [c], DrawKernels(), acceptance)[0] for t, rows, c in zip(trees, logits, contexts, strict=True)
    ]
    together = verify(trees, torch.cat(logits), contexts, DrawKernels(), acceptance)
    assert together == alone
    assert any(verdict.path for verdict in alone)

    # The same rows in another order, with rows of nobody between them.
    order = list(range(len(trees)))[::-1]
    starts, pieces, num = {}, [torch.full((2, 12), torch.nan)], 2
    for r in order:
        starts[r] = num
        pieces += [logits[r], torch.randn(1, 12)]
        num += len(logits[r]) + 1
    moved = verify(
        trees, torch.cat(pieces), contexts, DrawKernels(), acceptance, [starts[r] for r in range(len(trees))]
    )
    assert moved == alone


def test_greedy_requests_share_one_call_on_the_logits_themselves():
    trees, logits, contexts = batch(random.Random(2), "match")
    plain = [i for i in range(len(trees)) if i % len(MIX) == 0]
    rows, kernels = torch.cat([logits[i] for i in plain]), CountingKernels()
    verify([trees[i] for i in plain], rows, [contexts[i] for i in plain], kernels)
    assert len(kernels.calls) == 1
    assert kernels.calls[0] is rows


def test_drawn_at_once_or_in_waves_the_verdicts_are_equal(monkeypatch):
    trees, logits, contexts = batch(random.Random(4), "match")
    in_waves = verify(trees, torch.cat(logits), contexts, DrawKernels())
    monkeypatch.setattr("outrider.sampling.verify._noise_is_dear", lambda device: False)
    kernels = CountingKernels()
    assert verify(trees, torch.cat(logits), contexts, kernels) == in_waves
    assert len(kernels.calls[0]) == sum(map(len, logits))


def test_sampled_requests_draw_only_the_rows_that_walks_reach():
    trees, logits, contexts = batch(random.Random(2), "match")
    hot = [i for i in range(len(trees)) if i % len(MIX)]
    rows, kernels = torch.cat([logits[i] for i in hot]), CountingKernels()
    verdicts = verify([trees[i] for i in hot], rows, [contexts[i] for i in hot], kernels)
    assert sum(len(rows) for rows in kernels.calls) == sum(len(verdict.tokens) for verdict in verdicts)
    assert len(kernels.calls) == max(len(verdict.tokens) for verdict in verdicts)


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("where", ["root", "reached", "not reached"])
@pytest.mark.parametrize("params", MIX)
def test_nan_fails_its_request_and_no_other(acceptance, where, params):
    """Fault 11. A node that the walk does not reach is one that plain decoding would never have computed."""
    model = ToyModel(12)
    plain, request, neighbour = (make(i, seed=4, **params) for i in range(3))
    decode(plain, model, no_guess, 3, acceptance)
    said = plain.output[0]
    other = next(t for t in range(12) if t != said)
    tree = DraftTree((said, other) if acceptance == "match" else (other, said), (-1, -1))
    rows, context = model.rows(request.prompt, tree), Context(request, 12)
    (clean,) = verify([tree], rows, [context], DrawKernels(), acceptance)
    reached = clean.path[0] + 1 if clean.path else 0
    row = {"root": 0, "reached": reached, "not reached": 2 if reached != 2 else 1}[where]
    broken = rows.clone()
    broken[row, 5] = torch.nan
    trees, contexts = [tree, tree, DraftTree()], [Context(neighbour, 12), context, Context(neighbour, 12)]
    before, verdict, after = verify(trees, torch.cat([rows, broken, rows[:1]]), contexts, DrawKernels(), acceptance)
    assert before == clean
    assert after.tokens[0] < 12
    if where == "not reached":
        assert verdict == clean
    elif where == "reached" and reached:  # the next cycle starts there and fails
        assert verdict == Verdict((), clean.tokens[:1])
    else:
        assert isinstance(verdict, NumericsError)


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "logit_bias": {3: -math.inf}}])
def test_what_was_said_before_a_row_without_a_law_is_delivered(acceptance, params):
    """Fault 11, below the root: as many tokens as plain decoding says before it fails; the next cycle fails."""
    rows = torch.full((3, 12), -1000.0)
    rows[0, 1] = rows[1, 2] = 1000.0
    rows[2] = torch.nan
    chain, context = DraftTree.chain([1, 2]), Context(make(**params), 12)
    assert verify([chain], rows, [context], DrawKernels(), acceptance) == [Verdict((0,), (1, 2))]


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_forbids_everything_fails_alone(acceptance, temperature):
    ends = TokenAutomaton(0, {0: {1: 0}})
    stuck = make(0, temperature=temperature, automaton=ends, min_tokens=2, end_ids=(1,))
    contexts = [Context(stuck, 12), Context(make(1, temperature=temperature), 12)]
    bad, good = verify([DraftTree()] * 2, torch.randn(2, 12), contexts, DrawKernels(), acceptance)
    assert isinstance(bad, RequestError)
    assert good.tokens


@pytest.mark.parametrize("kind", ["plain", "native"])
def test_real_kernels_give_the_defined_text(kind):
    try:
        kernels = select(kind, torch.device("cpu"), 1)
    except KernelError as error:
        pytest.skip(f"no native kernels here: {error}")
    model, rng = ToyModel(300), random.Random(3)
    for i, params in enumerate([*MIX[:4], {"temperature": 0.9, "top_p": 0.8}]):
        defined, real = (make(i, seed=i, sample=2, **params) for _ in range(2))
        decode(defined, model, no_guess, 12)
        decode(real, model, lambda _: random_tree(rng, 300, 6), 12, kernels=kernels)
        assert real.output == defined.output


def test_no_requests():
    assert verify([], torch.zeros(0, 12), [], DrawKernels()) == []


def test_match_walks_to_the_last_node_that_the_target_says():
    tree = DraftTree((7, 8, 9, 7, 4), (-1, -1, 1, 1, 3))
    assert verify_match(tree, [8, 0, 7, 0, 4, 6].__getitem__) == Verdict((1, 3, 4), (8, 7, 4, 6))
    assert verify_match(tree, [9, 0, 0, 0, 0, 0].__getitem__) == Verdict((), (9,))
    assert verify_match(tree, [8, 0, -1, 0, 0, 0].__getitem__) == Verdict((1,), (8, -1))
    assert verify_match(DraftTree(), [3].__getitem__) == Verdict((), (3,))


def test_grammar_masks_hold_at_every_node():
    """a (b | c) repeated; guesses that break it, and what follows them, change nothing."""
    grammar = TokenAutomaton("a", {"a": {0: "b or c"}, "b or c": {1: "a", 2: "a"}})
    model, rng = ToyModel(4, scale=0.5), random.Random(6)
    for seed in range(20):
        plain, guessed = (make(i, seed=seed, temperature=1.5, automaton=grammar) for i in range(2))
        decode(plain, model, no_guess, 12)
        decode(guessed, model, lambda _: random_tree(rng, 4, 16), 12)
        assert guessed.output == plain.output
        assert all(t == 0 if i % 2 == 0 else t in (1, 2) for i, t in enumerate(plain.output))
