"""An output head that draws says what the draw of its logits says, bit for bit, on every kernel set."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import KernelError
from outrider.kernels.packing import quantise_outputs
from tests.kernels.test_draw import ROWS, keyed

HEATS = torch.tensor([0.0, 1.0, 0.7, 0.0, 1e-3, 30.0])


def numbers(rows: int = ROWS):
    """Seeds, samples and positions of so many rows."""
    return tuple(part[torch.arange(rows) % ROWS] for part in keyed(1)[1:])


def assert_drawn(kernels, linear, x, heats, vocab_size=None):
    logits = linear(x)[:, :vocab_size]
    keys = numbers(len(x))
    drawn = linear.draw(x, heats, *keys, vocab_size)
    assert torch.equal(drawn, kernels.draw(logits.contiguous(), heats, *keys))
    return drawn


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("vocab_size", [None, 1, 130, 199])
def test_a_head_draws_what_the_draw_of_its_logits_is(kernels, normal, kind, vocab_size):
    """Cold and warm rows in one call, biases, and a vocabulary that the last outputs are no part of."""
    weight, bias, x = normal(200, 96), normal(200), normal(ROWS, 96)
    if kind != "int8":
        linear = kernels.pack(weight.to(getattr(torch, kind)), bias)
    elif kernels.name == "native":
        with pytest.raises(KernelError, match="int8"):
            kernels.pack_quantised(kind, *quantise_outputs(weight), None, bias)
        return
    else:
        linear = kernels.pack_quantised(kind, *quantise_outputs(weight), None, bias)
    assert (assert_drawn(kernels, linear, x, HEATS, vocab_size) >= 0).all()
    assert_drawn(kernels, linear, x, torch.zeros(ROWS), vocab_size)


def test_a_row_draws_the_same_in_any_company(kernels, normal):
    linear, x = kernels.pack(normal(150, 64).bfloat16()), normal(ROWS, 64)
    whole = linear.draw(x, HEATS, *numbers())
    for rows in ([0], [5], [4, 1], [5, 4, 3, 2, 1, 0], [2] * 19):
        keys = (part[rows] for part in numbers())
        assert torch.equal(linear.draw(x[rows], HEATS[rows], *keys), whole[rows])
    assert linear.draw(x[:0], HEATS[:0], *numbers(0)).tolist() == []


@pytest.mark.parametrize(("scale", "heat"), [(1e30, 1e-38), (1e-30, 1e-30), (0.0, 1.0), (1e-4, 50.0)])
def test_scores_that_float32_cannot_hold_or_tell_apart_are_drawn_exactly(kernels, normal, scale, heat):
    linear, x = kernels.pack(normal(150, 64) * scale), normal(ROWS, 64)
    assert_drawn(kernels, linear, x, torch.full((ROWS,), heat))


@pytest.mark.parametrize("first", [0, 3, 63, 64, 130])
def test_ties_go_to_the_lowest_id(kernels, normal, first):
    weight = torch.zeros(150, 32)
    weight[[first, first + 1, min(first + 17, 149), 149], 0] = 1.0
    x = torch.zeros(1, 32)
    x[0, 0] = 2.0
    assert assert_drawn(kernels, kernels.pack(weight), x, torch.zeros(1)).tolist() == [first]


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_nan_or_nothing_to_draw_is_told_of_its_row_alone(kernels, normal, heat):
    linear = kernels.pack(normal(150, 64), torch.full((150,), -torch.inf))
    x = normal(ROWS, 64)
    assert linear.draw(x, torch.full((ROWS,), heat), *numbers()).tolist() == [-1] * ROWS
    linear = kernels.pack(normal(150, 64))
    x[2, 5] = torch.nan
    drawn = assert_drawn(kernels, linear, x, torch.full((ROWS,), heat))
    assert drawn[2] == -1
    assert (drawn[[0, 1, 3, 4, 5]] >= 0).all()
