"""Rows told from each last known token: the plain twin against what a host builds, Triton's against the plain twin."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.places import NOTHING, Placed, Relative, Standing
from outrider.models.batch import BatchBuilder
from tests.kernels.conftest import make as make_kernels

BLOCK, VOCAB = 4, 11


@pytest.fixture(scope="module", params=["plain", "triton"])
def kernels(request):
    return make_kernels(request.param)


def standing(rng: random.Random, lengths: list[int], ends: list[int]) -> Standing:
    blocks = rng.sample(range(1, 200), 12 * len(lengths))
    tables = torch.tensor(blocks, dtype=torch.int32).view(len(lengths), 12)
    return Standing(torch.tensor(lengths), torch.tensor(ends), tables, BLOCK)


def same(a: Placed, b: Placed) -> None:
    for field in fields(Placed):
        left, right = getattr(a, field.name), getattr(b, field.name)
        assert left.dtype == right.dtype, field.name
        assert torch.equal(left, right), field.name


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), are_known=st.booleans())
def test_triton_places_rows_as_its_twin_does(seed: int, are_known: bool) -> None:
    rng = random.Random(seed)
    size, width, depth = rng.randint(1, 3), rng.randint(1, 5), rng.randint(1, 4)
    # One of them is an empty seat now and then.
    lengths = [rng.choice([0, rng.randint(1, 30)]) for _ in range(size)]
    ends = [length + rng.randint(0, 6) if length else 0 for length in lengths]
    rows = Relative(
        tokens=torch.tensor([[rng.randint(NOTHING, VOCAB) for _ in range(width)] for _ in range(size)]),
        depths=torch.tensor([rng.randint(0, 5) for _ in range(width)]).expand(size, -1),
        places=torch.tensor([[rng.randint(0, 20) for _ in range(width)] for _ in range(size)]),
        paths=torch.tensor([[rng.randint(0, 20) for _ in range(depth)] for _ in range(size)])[:, None].expand(
            -1, width, -1
        ),
        deepest=torch.tensor([rng.randint(-1, 5) for _ in range(size)]),
        are_known=are_known,
    )
    at = standing(rng, lengths, ends)
    same(make_kernels("plain").place(at, rows, VOCAB), make_kernels("triton").place(at, rows, VOCAB))


def test_a_root_and_its_chain_lie_where_the_host_would_put_them(kernels) -> None:
    rng = random.Random(1)
    at = standing(rng, [7, 13], [40, 40])
    steps = torch.arange(4).expand(2, -1)
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 1]])
    paths = steps[:, None, 1:].expand(-1, 4, -1)
    found = kernels.place(at, Relative(tokens, steps, steps, paths, torch.tensor([5, 5])), VOCAB)
    builder = BatchBuilder(BLOCK)
    for number, known in enumerate((7, 13)):
        table = at.tables[number].tolist()
        builder.request(table)
        builder.line(known - 1, [int(tokens[number, 0])], 1)
        slots = [table[place // BLOCK] * BLOCK + place % BLOCK for place in range(known, known + 3)]
        builder.tree(known, tokens[number, 1:].tolist(), [-1, 0, 1], slots)
    batch = builder.build(torch.device("cpu"))
    keys = batch.keys
    assert found.tokens.tolist() == found.named.tolist() == batch.tokens.tolist()
    assert found.positions.tolist() == batch.positions.tolist()
    assert found.slots.tolist() == batch.slots.tolist()
    assert found.request.tolist() == keys.request.tolist()
    assert found.linear.tolist() == keys.linear.tolist()
    assert found.length.tolist() == keys.length.tolist()
    for row, (length, linear) in enumerate(zip(keys.length.tolist(), keys.linear.tolist(), strict=True)):
        assert found.tails[row, : length - linear].tolist() == keys.tails[row, : length - linear].tolist()


def test_rows_that_are_none_write_to_slot_0_and_see_nothing_else(kernels) -> None:
    at = standing(random.Random(2), [7], [10])
    depths = torch.tensor([[0, 1, 2, 3, 1, 1]])
    tokens = torch.tensor([[3, 4, 5, 6, NOTHING, VOCAB]])
    found = kernels.place(at, Relative(tokens, depths, depths, depths[:, :, None], torch.tensor([2])), VOCAB)
    # Deeper than it may be; none; no token of the vocabulary.
    assert found.named.tolist() == [3, 4, 5, NOTHING, NOTHING, NOTHING]
    assert found.tokens[3:].tolist() == found.slots[3:].tolist() == found.linear[3:].tolist() == [0, 0, 0]
    assert found.length[3:].tolist() == [1, 1, 1]
    ended = kernels.place(at, Relative(tokens, depths + 2, depths, depths[:, :, None], torch.tensor([9])), VOCAB)
    assert ended.named.tolist() == [3, *[NOTHING] * 5]
