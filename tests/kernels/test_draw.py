"""The keyed draw: the same noise as its definition, the same token as float64, and its edges."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels import noise
from tests.kernels.conftest import make

ROWS = 6


def keyed(vocab: int):
    generator = torch.Generator().manual_seed(5)
    seeds = torch.tensor([0, 1, -1, 2**62, -(2**63), 12345678901234567])
    samples = torch.tensor([0, 1, 2, 3, 0, 7], dtype=torch.int32)
    positions = torch.tensor([0, 5, 100000, 2**31 - 1, 3, 4], dtype=torch.int32)
    return torch.randn(ROWS, vocab, generator=generator) * 3, seeds, samples, positions


def golden(logits, temperature, seeds, samples, positions):
    """By definition, in float64; ties by Python's own order."""
    g = noise.gumbel(seeds, samples, positions, logits.shape[1])
    tokens = []
    for row in range(logits.shape[0]):
        values = logits[row].double()
        if temperature[row] != 0:
            values = values / temperature[row].double() + g[row]
        listed = values.tolist()
        tokens.append(listed.index(max(listed)))
    return torch.tensor(tokens)


@pytest.mark.parametrize("stream", [0, 1, 2**31 + 5])
def test_native_noise_is_the_defined_noise(native, stream):
    _, seeds, samples, positions = keyed(1)
    ours = native.gumbel(seeds, samples, positions, 1003, stream)
    theirs = noise.gumbel(seeds, samples, positions, 1003, stream)
    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)
    # exp(-exp(-g)) is the uniform that g came from, so equal words give it back.
    uniform = noise.uniform(seeds, samples, positions, stream, 1003)
    torch.testing.assert_close((-(-ours).exp()).exp(), uniform, atol=2.0**-34, rtol=0)


@pytest.mark.parametrize("vocab", [1, 5, 64, 1000, 9001])
def test_draws_equal_the_definition(kernels, vocab):
    logits, seeds, samples, positions = keyed(vocab)
    for temperature in (0.0, 1.7) if kernels.name == "triton" else (0.0, 0.3, 1.0, 1.7):
        warm = torch.full((ROWS,), temperature)
        drawn = kernels.draw(logits, warm, seeds, samples, positions)
        assert torch.equal(drawn, golden(logits, warm, seeds, samples, positions))


def test_a_row_draws_the_same_in_any_company(kernels):
    logits, seeds, samples, positions = keyed(5000)
    warm = torch.tensor([0.0, 1.0, 0.7, 0.0, 2.0, 1.0])
    whole = kernels.draw(logits, warm, seeds, samples, positions)
    for rows in ([0], [3], [4, 1], [5, 4, 3, 2, 1, 0], [2] * (7 if kernels.name == "triton" else 17)):
        drawn = kernels.draw(logits[rows], warm[rows], seeds[rows], samples[rows], positions[rows])
        assert torch.equal(drawn, whole[rows])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_ties_and_nan(kernels, temperature):
    logits, seeds, samples, positions = keyed(5000)
    warm = torch.full((ROWS,), temperature)
    logits[0] = -torch.inf
    logits[1] = -torch.inf
    logits[1, 4321] = -7.0
    logits[2, 4999] = torch.nan
    logits[3] = torch.nan
    logits[4] = -torch.inf
    logits[4, [90, 4097]] = 1.0
    drawn = kernels.draw(logits, warm, seeds, samples, positions).tolist()
    assert drawn[0] == drawn[2] == drawn[3] == -1
    assert drawn[1] == 4321
    assert drawn[4] == (90 if temperature == 0 else golden(logits, warm, seeds, samples, positions)[4])
    assert drawn[5] == golden(logits, warm, seeds, samples, positions)[5], "neighbours are unchanged"


@pytest.mark.parametrize("first", [0, 3, 15, 16, 63, 64, 4095, 4096, 8190])
def test_greedy_ties_go_to_the_lowest_id(kernels, first):
    logits = torch.zeros(1, 9001)
    logits[0, [first, first + 1, first + 17, 9000]] = 2.5
    zero = torch.zeros(1, dtype=torch.int32)
    assert kernels.draw(logits, torch.zeros(1), zero.long(), zero, zero).tolist() == [first]


def test_a_logit_too_low_to_win_without_noise_wins_with_it(kernels):
    """Over many positions the draw follows the law: tokens of probability 0.75 and 0.25."""
    rows = 24 if kernels.name == "triton" else 1000  # its interpreter takes its time, and below it is held to more
    logits = torch.tensor([[0.75, 0.25]]).log().repeat(rows, 1)
    seeds, positions = torch.full((rows,), 9), torch.arange(rows, dtype=torch.int32)
    drawn = kernels.draw(logits, torch.ones(rows), seeds, torch.zeros_like(positions), positions)
    share = float(drawn.double().mean())
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / rows) ** 0.5
    keys = torch.ones(rows), seeds, torch.zeros_like(positions), positions
    assert torch.equal(drawn, golden(logits, *keys)), "the law is the definition's, draw by draw"


def test_a_rough_look_is_near_enough_at_both_ends_of_the_noise():
    """Triton's draw decides in float64 only among tokens whose float32 score comes within 1e-3 of the best."""
    triton = make("triton")
    from outrider.kernels.triton.draw import _look

    positions = torch.arange(2_000_000, dtype=torch.int32)
    nothing = torch.zeros_like(positions)
    words = noise.words(nothing.long(), nothing, positions, 0, 1)[:, 0]
    order = words.argsort()
    near = [int((words - word).abs().argmin()) for word in (2**31, 2**32 - 2**25, 2**32 - 2**25 - 2000)]
    rows = torch.cat([order[:4], order[-12:], torch.tensor(near), order[::250_000]])
    assert int(words[rows].max()) >= 2**32 - 10_000
    g = noise.gumbel(nothing[rows].long(), nothing[rows], positions[rows], 1)[:, 0]
    bests = torch.empty(len(rows), 1)
    keyed = torch.zeros(len(rows), 1), torch.ones(len(rows)), nothing[rows].long(), nothing[rows], positions[rows]
    _look[(len(rows), 1)](*keyed, bests, 1, 1, 1, 1, TOKENS=16)
    torch.testing.assert_close(bests[:, 0].double(), g, atol=1e-4, rtol=0)
    assert triton.draw(*keyed).tolist() == [0] * len(rows)


@pytest.mark.parametrize(("scale", "heat"), [(1e-30, 1e-30), (1e30, 1e-38)])
def test_scores_that_float32_cannot_hold_or_tell_apart_are_drawn_exactly(kernels, scale, heat):
    logits, seeds, samples, positions = keyed(3000)
    logits, warm = logits * scale, torch.full((ROWS,), heat)
    drawn = kernels.draw(logits, warm, seeds, samples, positions)
    assert torch.equal(drawn, golden(logits, warm, seeds, samples, positions))


@pytest.mark.parametrize(("vocab", "kept"), [(1, None), (63, None), (5000, None), (9001, 3000), (300, 1)])
def test_ranks_by_the_scores_that_a_draw_compares(kernels, vocab, kept):
    """The best columns by definition, in float64, cold and warm rows in one call; and the mass of the cold ones."""
    logits, seeds, samples, positions = keyed(vocab)
    ids = None if kept is None else torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:kept].sort()[0]
    logits = logits if ids is None else logits[:, :kept].contiguous()
    warm = torch.tensor([0.0, 1.0, 0.6, 0.0, 1e-4, 2.0])
    scores, columns, masses = kernels.rank(logits, 4, warm, seeds, samples, positions, ids)
    g = noise.gumbel(seeds, samples, positions, vocab)
    for row in range(ROWS):
        values = logits[row].double()
        if warm[row]:
            values = values / warm[row].double() + (g[row] if ids is None else g[row, ids])
        listed = values.tolist()
        best = sorted(range(len(listed)), key=lambda column, listed=listed: (-listed[column], column))[:4]
        assert columns[row].tolist() == best
        torch.testing.assert_close(scores[row], values[best], atol=1e-9, rtol=1e-11)
        if not warm[row]:
            assert float(masses[row]) == pytest.approx(float(torch.logsumexp(values, 0)), abs=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 3.0, 40.0, 1e5])
@pytest.mark.parametrize("columns", [4000, 4111])
def test_no_column_that_ranks_is_passed_over(native, scale, columns):
    """Whatever bound spares a column its noise, in levels whose rows share theirs; peaks, ties and ids with gaps."""
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(ROWS, columns, generator=generator) * scale
    logits[1] = logits[1].round()
    logits[2, torch.randint(columns, (40,), generator=generator)] += 20 * scale
    ids = torch.randperm(20_000, generator=generator)[:columns].sort()[0]
    warm = torch.tensor([1.0, 1.0, 0.05, 0.6, 30.0, 1e-3])
    seeds, zero = torch.full((ROWS,), -77), torch.zeros(ROWS, dtype=torch.int32)
    positions = torch.tensor([4, 4, 4, 4, 4, 5], dtype=torch.int32)
    scores, ranked, _ = native.rank(logits, 8, warm, seeds, zero, positions, ids)
    values = logits.double() / warm.double()[:, None] + noise.gumbel(seeds, zero, positions, 20_000)[:, ids]
    best, order = values.topk(8)
    torch.testing.assert_close(scores, best, atol=1e-9, rtol=1e-11)
    gaps = (best[:, :-1] - best[:, 1:]).min(1).values
    assert torch.equal(ranked[gaps > 1e-8], order[gaps > 1e-8])
    assert (gaps > 1e-8).sum() > 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ranks_nothing_that_cannot_be_drawn(kernels, temperature):
    logits, seeds, samples, positions = keyed(5000)
    logits[0] = -torch.inf
    logits[1] = -torch.inf
    logits[1, [70, 4321]] = torch.tensor([-7.0, 60.0])
    logits[2, 4999] = torch.nan
    _, columns, _ = kernels.rank(logits, 3, torch.full((ROWS,), temperature), seeds, samples, positions)
    assert columns[0].tolist() == columns[2].tolist() == [-1, -1, -1]
    assert columns[1].tolist() == [4321, 70, -1]
    assert (columns[3:] >= 0).all(), "neighbours are unchanged"
    tied = torch.zeros(1, 5000)
    tied[0, [9, 2047, 2048, 4990]] = 1.0
    zero = torch.zeros(1, dtype=torch.int32)
    assert kernels.rank(tied, 4, torch.zeros(1), zero.long(), zero, zero)[1].tolist() == [[9, 2047, 2048, 4990]]
