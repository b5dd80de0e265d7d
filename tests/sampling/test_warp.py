"""The warped law against Transformers' processors and OpenAI's formula, with a path's tokens counted in."""

import math
import random

import pytest
import torch
from transformers import generation as hf

from outrider.errors import NumericsError, RequestError
from outrider.sampling.automaton import TokenAutomaton
from outrider.sampling.context import Context, Row
from outrider.sampling.verify import verify
from outrider.sampling.warp import law, warp
from outrider.tree import DraftTree
from tests.laws import DrawKernels, ToyModel, decode, make, no_guess, random_tree


def row_after(tokens, vocab_size=40, prompt=(1, 2), **params):
    """The root's row of a request that has said `tokens`."""
    request = make(prompt=prompt, **params)
    request.output.extend(tokens)
    return Context(request, vocab_size).rows(DraftTree())[0]


def transformers_law(logits, row):
    """The law by Transformers' own processors, in the order in which `generate` chains them."""
    params, request = row.context.params, row.context.request
    chain = hf.LogitsProcessorList()
    if params.logit_bias:
        chain.append(hf.SequenceBiasLogitsProcessor({(t,): b for t, b in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_words:
        chain.append(hf.NoBadWordsLogitsProcessor([list(words) for words in params.bad_words]))
    if params.min_tokens:
        ends = sorted(request.end_ids)
        chain.append(hf.MinNewTokensLengthLogitsProcessor(len(request.prompt), params.min_tokens, ends))
    if params.automaton:
        allowed = list(params.automaton.allowed(row.state))
        chain.append(hf.PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, num_beams=1))
    chain.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(hf.MinPLogitsWarper(params.min_p))
    ids = torch.tensor([[*request.prompt, *request.output, *row.path]])
    return torch.softmax(chain(ids, logits.unsqueeze(0))[0].double(), 0)


CYCLE = TokenAutomaton(0, {0: dict.fromkeys(range(3, 35), 1), 1: dict.fromkeys(range(9, 38), 0)})
CASES = {
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 0.8, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "truncations": {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    "top_k above the vocabulary": {"temperature": 1.0, "top_k": 1000},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.8},
    "repetition below 1": {"temperature": 1.0, "repetition_penalty": 0.7},
    "bias": {"temperature": 1.0, "logit_bias": {3: 2.5, 7: -100.0, 9: -math.inf}},
    "bad words": {"temperature": 1.0, "bad_words": ((11,), (30, 31), (30, 30, 12))},
    "min_tokens": {"temperature": 1.0, "min_tokens": 9, "end_ids": (4, 6)},
    "min_tokens passed": {"temperature": 1.0, "min_tokens": 3, "end_ids": (4, 6)},
    "automaton": {"temperature": 1.0, "automaton": CYCLE},
    "all": {
        "temperature": 0.9,
        "top_k": 12,
        "top_p": 0.85,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "logit_bias": {10: 3.0, 12: -2.0},
        "bad_words": ((11,), (30, 12)),
        "min_tokens": 9,
        "end_ids": (14,),
        "automaton": CYCLE,
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vocab_size", [40, 3000])
def test_law_is_that_of_transformers(case, vocab_size):
    generator = torch.Generator().manual_seed(len(case))
    for trial in range(20):
        row = row_after([20, 21, 30, 30], vocab_size, **CASES[case])
        logits = torch.randn(vocab_size, generator=generator) * (1 + trial % 4)
        ours = law(warp(logits, row), row.context.temperature)
        theirs = transformers_law(logits, row)
        assert torch.equal(ours > 0, theirs > 0)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("top_p", "scale"), [(0.5, 0.01), (0.95, 0.3), (0.999, 1.0), (0.2, 3.0)])
def test_nucleus_wider_than_the_ranked_head(top_p, scale):
    generator = torch.Generator().manual_seed(1)
    row = row_after([], 5000, temperature=1.0, top_p=top_p)
    logits = torch.randn(5000, generator=generator, dtype=torch.float64) * scale
    kept = warp(logits.float(), row) > -torch.inf
    p = torch.softmax(logits.float().double(), 0)
    ranked = torch.sort(p, descending=True)
    above = ranked.values.cumsum(0) - ranked.values
    expected = torch.zeros(5000, dtype=torch.bool)
    expected[ranked.indices[above < top_p]] = True
    assert torch.equal(kept, expected)


def test_frequency_and_presence_follow_openai():
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, over the completion alone."""
    row = row_after([5, 5, 7], prompt=(5, 8, 8), frequency_penalty=0.5, presence_penalty=-1.25)
    logits = torch.randn(40)
    expected = logits.clone()
    expected[5] = logits[5] - 2 * 0.5 + 1.25
    expected[7] = logits[7] - 0.5 + 1.25
    torch.testing.assert_close(warp(logits, row), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", ["all", "penalties", "bad words", "min_tokens"])
def test_a_path_counts_like_the_completion(case):
    params = CASES.get(case) or {"frequency_penalty": 2.0, "presence_penalty": -2.0, "repetition_penalty": 1.5}
    rng = random.Random(3)
    for _ in range(30):
        said, path = [rng.randint(9, 29) for _ in range(3)], [rng.choice((9, 12, 30)) for _ in range(4)]
        node = row_after(said, **params).context.rows(DraftTree.chain(path))[-1]
        root = row_after([*said, *path], **params)
        assert node.position == root.position
        assert node.state == root.state
        logits = torch.randn(40)
        assert torch.equal(warp(logits, node), warp(logits, root))


def test_bad_words_span_the_completion_and_the_path_but_not_the_prompt():
    bad = ((3, 4, 5),)

    def forbidden(prompt, said, path):
        request = make(prompt=prompt, bad_words=bad)
        request.output.extend(said)
        row = Context(request, 8).rows(DraftTree.chain(path))[-1]
        return bool(warp(torch.zeros(8), row)[5] == -torch.inf)

    assert forbidden((0,), (3, 4), ())
    assert forbidden((0,), (3,), (4,))
    assert forbidden((0,), (), (3, 4))
    assert forbidden((0,), (7, 7), (1, 3, 4))
    assert not forbidden((0, 3), (4,), ())
    assert not forbidden((0,), (4, 3), ())
    assert not forbidden((0,), (3,), (4, 4))


def test_ties_at_the_edge_of_a_nucleus_go_to_the_lowest_ids():
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    kept = warp(logits, row_after([], 6, prompt=(1,), temperature=1.0, top_p=0.4)) > -torch.inf
    assert kept.nonzero().flatten().tolist() == [1, 2]  # each of the four holds 0.211
    wide = torch.zeros(5000)
    kept = warp(wide, row_after([], 5000, temperature=1.0, top_p=0.5)) > -torch.inf
    assert kept.nonzero().flatten().tolist() == list(range(2500))


def test_nothing_to_do_copies_nothing():
    logits = torch.randn(40)
    for params in ({}, {"temperature": 0.7}, {"top_k": 3, "top_p": 0.5, "min_p": 0.3}, {"min_tokens": 1}):
        row = row_after([4], **params)
        assert warp(logits, row) is logits
    before = logits.clone()
    warp(logits, row_after([4], **CASES["all"]))
    assert torch.equal(logits, before)


def test_laws_at_temperature_0_put_all_mass_on_the_lowest_argmax():
    assert law(torch.tensor([0.0, 2.0, 2.0]), 0.0).tolist() == [0, 1, 0]
    assert law(torch.tensor([1.0, 0.0, 1.0]), 0.0).tolist() == [1, 0, 0]


def test_rows_without_a_law_are_named():
    with pytest.raises(NumericsError):
        law(torch.tensor([0.0, math.nan]), 1.0)
    with pytest.raises(NumericsError):
        law(torch.tensor([0.0, math.inf]), 1.0)
    with pytest.raises(RequestError, match="no token is left"):
        law(torch.full((3,), -math.inf), 1.0)


def test_a_forbidden_nan_still_shows():
    """A mask must not hide that the model broke."""
    logits = torch.zeros(40)
    logits[39] = math.nan
    assert torch.isnan(warp(logits, row_after([], temperature=1.0, automaton=CYCLE))).any()


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"logit_bias": {40: 1.0}}, "logit_bias"),
        ({"bad_words": ((1, 77),)}, "bad_words"),
        ({"bad_words": ("a text",)}, "bad_words"),
        ({"stop_token_ids": (40,)}, "stop_token_ids"),
        ({"temperature": 1e-40}, "temperature"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(params, name):
    with pytest.raises(RequestError, match=name):
        Context(make(**params), 40)


def test_an_automaton_that_names_a_foreign_token_fails_its_request_only():
    foreign = TokenAutomaton(0, {0: {50: 0}})
    contexts = [Context(make(automaton=foreign), 40), Context(make(), 40)]
    bad, good = verify([DraftTree()] * 2, torch.randn(2, 40), contexts, DrawKernels())
    assert isinstance(bad, RequestError)
    assert good.tokens


BANNED = {"bias": {"logit_bias": {2: -100.0}}, "min_p": {"min_p": 0.5}}


@pytest.mark.parametrize("case", BANNED)
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_what_is_banned_never_appears_at_depth_5(case, acceptance):
    """Fault 6: 10,000 draws in all behind chains that guess the banned token too."""
    model, rng = ToyModel(5, scale=1.0, memory=2), random.Random(8)
    request = make(seed=3, temperature=1.0, **BANNED[case])

    def guess(_):
        return DraftTree.chain([rng.randrange(5) for _ in range(5)])

    decode(request, model, guess, 2_500, acceptance)
    sequence = [*request.prompt, *request.output]
    for i, token in enumerate(request.output, len(request.prompt)):
        if case == "bias":
            assert token != 2
        else:
            p = torch.softmax(model.logits(tuple(sequence[i - 2 : i])), 0)
            assert p[token] >= 0.5 * p.max() - 1e-6


@pytest.mark.parametrize("value", [-2.0, 2.0])
@pytest.mark.parametrize("field", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_equal_plain_and_count_every_token(field, value, temperature):
    """Fault 7; the repetition penalty is a factor, so 1/2 and 2."""
    params = {field: 2.0**value if field == "repetition_penalty" else value, "temperature": temperature}
    model, rng = ToyModel(6, scale=1.0), random.Random(5)
    plain, guessed = make(seed=9, **params), make(seed=9, **params)
    context = Context(guessed, 6)
    decode(plain, model, no_guess, 24)
    for goal in range(3, 25, 3):
        decode(guessed, model, lambda _: random_tree(rng, 6, 20), goal, context=context)
        assert context.counts(()).tolist() == [guessed.output.count(t) for t in range(6)]
    assert guessed.output == plain.output


def test_a_row_of_a_dead_path_is_left_alone():
    context = Context(make(automaton=CYCLE), 40)
    rows = context.rows(DraftTree((0, 5, 9, 3), (-1, 0, -1, 2)))
    assert [row.is_dead for row in rows] == [False, True, True, False, True]
    logits = torch.randn(40)
    assert warp(logits, rows[2]) is logits
    assert isinstance(rows[3], Row)
    allowed = (warp(logits, rows[3]) > -torch.inf).nonzero().flatten().tolist()
    assert allowed == list(range(9, 38))


@pytest.mark.parametrize("case", ["top_p", "truncations", "temperature"])
def test_a_law_has_the_same_bits_wherever_its_row_lies(case):
    """Rows of odd length start at any alignment."""
    logits = torch.randn(7, 40_001, generator=torch.Generator().manual_seed(5)) * 3
    row = row_after([], 40_001, **CASES[case])
    for i in range(7):
        alone = law(warp(logits[i].clone(), row), row.context.temperature)
        assert torch.equal(law(warp(logits[i], row), row.context.temperature), alone)
