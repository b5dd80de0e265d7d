"""The match rule, seed by seed: the text behind any guesses is the text of plain drawing."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.automaton import TokenAutomaton
from outrider.sampling.verify import verify_match
from outrider.tree import ROOT, DraftTree
from tests.laws import ToyModel, decode, make, no_guess, random_tree


def all_trees(vocab_size, depth):
    """Every tree of at most `depth` levels, siblings in one order, as nested (token, subtree) pairs."""
    if depth == 0:
        return [()]
    below = all_trees(vocab_size, depth - 1)
    choices = [[None, *below]] * vocab_size
    return [
        tuple((token, sub) for token, sub in enumerate(picked) if sub is not None)
        for picked in itertools.product(*choices)
    ]


def flat(nested):
    tokens, parents = [], []
    level = [(ROOT, nested)]
    while level:
        parent, children = level.pop(0)
        for token, sub in children:
            tokens.append(token)
            parents.append(parent)
            level.append((len(tokens) - 1, sub))
    return DraftTree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize(("vocab_size", "depth"), [(2, 1), (2, 2), (3, 1), (4, 1)])
def test_every_tree_against_every_outcome_of_the_draws(vocab_size, depth):
    """All trees x all functions from text to drawn token: the verdict is the longest guessed prefix of the text."""
    texts = [text for n in range(depth + 1) for text in itertools.product(range(vocab_size), repeat=n)]
    trees = [flat(nested) for nested in all_trees(vocab_size, depth)]
    for outcome in itertools.product(range(vocab_size), repeat=len(texts)):
        drawn = dict(zip(texts, outcome, strict=True))
        plain = ()
        for _ in range(depth + 1):
            plain = (*plain, drawn[plain])
        for tree in trees:
            paths = [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(ROOT, len(tree))]
            verdict = verify_match(tree, lambda row, paths=paths, drawn=drawn: drawn[paths[row]])
            guessed = max(len(path) for path in paths if path == plain[: len(path)])
            assert verdict.tokens == plain[: guessed + 1]
            assert [tree.tokens[i] for i in verdict.path] == list(plain[:guessed])


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_three_levels_sampled(seed, tree_seed):
    rng = random.Random(tree_seed)
    tree = random_tree(rng, 3, 30, most_depth=3)
    drawn = {}
    paths = [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(ROOT, len(tree))]
    plain = ()
    for _ in range(4):
        drawn[plain] = random.Random(f"{seed}{plain}").randrange(3)
        plain = (*plain, drawn[plain])
    verdict = verify_match(tree, lambda row: random.Random(f"{seed}{paths[row]}").randrange(3))
    assert verdict.tokens == plain[: len(verdict.tokens)]
    assert len(verdict.tokens) == 1 + max(len(path) for path in paths if path == plain[: len(path)])


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.3, 1.0, 1.7]),
        "top_k": st.integers(0, 4),
        "top_p": st.sampled_from([0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.3]),
        "repetition_penalty": st.sampled_from([0.6, 1.5]),
        "frequency_penalty": st.sampled_from([-2.0, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, 4), st.sampled_from([-100.0, 2.0]), max_size=2),
        "bad_words": st.sampled_from([(), ((1,), (2, 3)), ((0, 0, 0), (4, 1))]),
        "min_tokens": st.integers(0, 8),
        "automaton": st.sampled_from(
            [None, TokenAutomaton(0, {0: {0: 1, 3: 0, 4: 0}, 1: {t: t % 2 for t in range(5)}})]
        ),
    },
)


@given(params=PARAMS, seed=st.integers(0, 2**64 - 1), sample=st.integers(0, 3), tree_seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_any_guesses_any_fields_same_text(params, seed, sample, tree_seed):
    """Several cycles through `verify`, guesses drawn without any regard to the target."""
    model, rng = ToyModel(5, scale=1.0), random.Random(tree_seed)
    plain, guessed = (make(i, seed=seed, sample=sample, end_ids=(2,), **params) for i in range(2))
    try:
        decode(plain, model, no_guess, 10)
    except Exception as error:
        with pytest.raises(type(error)):
            decode(guessed, model, lambda _: random_tree(rng, 5, 25), 10)
        assert guessed.output == plain.output[: len(guessed.output)]
        return
    decode(guessed, model, lambda _: random_tree(rng, 5, 25), 10)
    assert guessed.output == plain.output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("depth", [1, 8, 20, 32])
def test_depth_changes_no_text_and_right_guesses_cost_few_cycles(depth, temperature):
    """Fault 15, with an oracle that is wrong at every seventh position."""
    model = ToyModel(6)
    plain, guessed = (make(i, seed=12, temperature=temperature) for i in range(2))
    decode(plain, model, no_guess, 64)

    def oracle(request):
        at = len(request.output)
        guess = [t if (at + i) % 7 else (t + 1) % 6 for i, t in enumerate(plain.output[at : at + depth])]
        return DraftTree.chain(guess)

    cycles = decode(guessed, model, oracle, 64)
    assert guessed.output == plain.output
    assert cycles == 64 if depth == 0 else cycles <= 64 // min(depth + 1, 7) + 12
