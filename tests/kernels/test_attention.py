"""Paged attention against a dense softmax in float64, with trees, windows, caps and sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider.kernels.base import KeyIndex
from tests.kernels.conftest import ALL_KERNELS, make

SLOTS, BLOCK = 1024, 16
LENGTHS = [1, 2, 16, 17, 255, 256, 257, 300, 513]
FEWER = [1, 17, 256, 257, 513]
"""Of Triton's interpreter, which takes its time: on and behind the edges of a part and of a chunk."""


def lengths(kernels: str) -> list[int]:
    return FEWER if kernels == "triton" else LENGTHS


def make_keys(lengths: Sequence[int] = LENGTHS) -> KeyIndex:
    """Two requests over shuffled blocks; up to four last positions of a row lie in its own tail."""
    generator = torch.Generator().manual_seed(3)
    length = torch.tensor(lengths, dtype=torch.int32)
    tail = torch.randint(0, 5, length.shape, generator=generator, dtype=torch.int32)
    return KeyIndex(
        tables=torch.randperm(SLOTS // BLOCK - 4, generator=generator)[:60].view(2, 30).repeat(1, 2).int() + 4,
        request=torch.randint(0, 2, length.shape, generator=generator, dtype=torch.int32),
        linear=(length - tail).clamp(min=0),
        tails=torch.randint(0, 4 * BLOCK, (len(length), 4), generator=generator, dtype=torch.int32),
        length=length,
        block_size=BLOCK,
    )


def row_keys(keys: KeyIndex, row: int) -> list[int]:
    """The slots of a row's keys in position order, by the words of `KeyIndex`."""
    slots = []
    for x in range(int(keys.length[row])):
        if x < keys.linear[row]:
            slots.append(int(keys.tables[keys.request[row], x // BLOCK]) * BLOCK + x % BLOCK)
        else:
            slots.append(int(keys.tails[row, x - keys.linear[row]]))
    return slots


def dense(q, k_pages, v_pages, keys, scale, window=None, softcap=None, sinks=None, skip_first=False):
    """(T, Hq, D) float64, a row and a head at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_pages.shape[1]
    for row in range(q.shape[0]):
        slots = row_keys(keys, row)[-window if window else 0 :]
        slots = slots[1:] if skip_first and len(slots) > 1 else slots
        for head in range(q.shape[1]):
            k, v = (pages[slots, head // group].double() for pages in (k_pages, v_pages))
            scores = k @ q[row, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            weights = scores.softmax(0)
            out[row, head] = weights[: len(slots)] @ v
    return out


def assert_near(out, kernels: str, q, k_pages, v_pages, keys, scale, **options):
    """`out` is the dense softmax; by tensor cores it is that of the rounded queries, and weights are rounded, too.

    A weight is off by up to 2 ** -9 of itself then, in the values' sum and in the total by which it is divided.
    """
    rounded = kernels == "triton" and k_pages.dtype == torch.bfloat16
    q = q.bfloat16() if rounded else q
    golden = dense(q, k_pages, v_pages, keys, scale, **options)
    bound = 2**-8 * dense(q, k_pages, v_pages.abs(), keys, scale, **options) if rounded else 0.0
    assert ((out.double() - golden).abs() <= bound + 3e-6 + 1e-5 * golden.abs()).all()


def part_of(keys: KeyIndex, rows: list[int]) -> KeyIndex:
    names = ("request", "linear", "tails", "length")
    return replace(keys, **{name: getattr(keys, name)[rows].contiguous() for name in names})


OPTIONS = [{}, {"window": 37}, {"softcap": 3.0}, {"window": 300, "sinks": True}, {"skip_first": True}]
SHAPES = [
    (6, 2, 64, torch.float32),
    (6, 2, 64, torch.bfloat16),
    (2, 2, 128, torch.float32),
    (4, 1, 40, torch.bfloat16),
    (2, 1, 3, torch.float32),
]


CAUSAL, WINDOW, SOFTCAP, SINKS = range(4)
INTERPRETED = {(0, SINKS), (1, CAUSAL), (2, WINDOW), (3, WINDOW), (3, SOFTCAP), (3, SINKS), (4, CAUSAL), (4, SOFTCAP)}
"""Shapes and options that Triton's interpreter takes its seconds for: all shapes, and each option beside either kind of
pages. An option moves or masks scores and a shape cuts the keys, so that a pair of them adds nothing of its own; the
slow tests take the other pairs, and a GPU all of them (test_triton.py)."""


def cases() -> list:
    """Every kernel set with every shape and option."""
    return [
        pytest.param(
            kernels,
            *shape,
            option,
            marks=[pytest.mark.slow] if kernels == "triton" and (i, j) not in INTERPRETED else [],
            id="-".join((kernels, *map(str, shape), *(option or ["causal"]))),
        )
        for kernels in ALL_KERNELS
        for i, shape in enumerate(SHAPES)
        for j, option in enumerate(OPTIONS)
    ]


@pytest.mark.parametrize(("kernels", "heads", "kv", "dim", "pages", "options"), cases(), indirect=["kernels"])
def test_attention_equals_a_dense_softmax(kernels, normal, heads, kv, dim, pages, options):
    keys = make_keys(lengths(kernels.name))
    if kernels.name == "triton" and heads == 6:
        heads, kv = 3, 1  # a group of heads is like another, and the next shape has two of them
    q = normal(len(keys.length), heads, dim)
    k_pages, v_pages = normal(SLOTS, kv, dim).to(pages), normal(SLOTS, kv, dim).to(pages)
    options = {**options, **({"sinks": normal(heads)} if "sinks" in options else {})}
    out = kernels.attention(q, k_pages, v_pages, keys, dim**-0.5, **options)
    assert_near(out, kernels.name, q, k_pages, v_pages, keys, dim**-0.5, **options)


def test_queries_may_be_rounded_before(normal):
    """What a tensor core rounds them to may be written at once, half of the bytes."""
    kernels, keys = make("triton"), make_keys(FEWER[:3])
    q, (k_pages, v_pages) = normal(3, 2, 40), (normal(SLOTS, 1, 40).bfloat16() for _ in range(2))
    out = kernels.attention(q, k_pages, v_pages, keys, 0.125)
    assert torch.equal(kernels.attention(q.bfloat16(), k_pages, v_pages, keys, 0.125), out)


@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.slow), 40])
def test_a_row_has_the_same_bits_in_any_company(kernels, normal, dim):
    """Neither the other rows, nor their lengths, nor longer tables and tails change a row."""
    keys = make_keys(lengths(kernels.name))
    last = len(keys.length) - 1
    kv = 1 if kernels.name == "triton" else 2  # its interpreter takes its time, and a group of heads is like another
    q, k_pages, v_pages = normal(last + 1, 3 * kv, dim), normal(SLOTS, kv, dim), normal(SLOTS, kv, dim)
    whole = kernels.attention(q, k_pages, v_pages, keys, 0.1)
    for rows in ([0], [last], [last, 0, last // 2], [2, 2, 2], list(range(last, -1, -1))):
        out = kernels.attention(q[rows], k_pages, v_pages, part_of(keys, rows), 0.1)
        assert torch.equal(out, whole[rows])
    wider = replace(keys, tails=torch.nn.functional.pad(keys.tails, (0, 3)))
    assert torch.equal(kernels.attention(q, k_pages, v_pages, wider, 0.1), whole)


def test_a_tree_node_has_the_bits_of_its_own_line(kernels, normal):
    """The same keys, in a tail or in a table: where a key lies changes nothing."""
    q, k_pages, v_pages = normal(1, 6, 64), normal(SLOTS, 2, 64), normal(SLOTS, 2, 64)
    table = torch.arange(20, dtype=torch.int32)[None]
    zero = torch.zeros(1, dtype=torch.int32)
    line = KeyIndex(table, zero, zero + 290, zero[None], zero + 290, BLOCK)
    far = torch.tensor([[700, 651, 990]], dtype=torch.int32)
    for pages in (k_pages, v_pages):
        pages[far[0].long()] = pages[287:290].clone()
    tree = KeyIndex(table, zero, zero + 287, far, zero + 290, BLOCK)
    assert torch.equal(
        kernels.attention(q, k_pages, v_pages, line, 0.125), kernels.attention(q, k_pages, v_pages, tree, 0.125)
    )


def test_what_lies_in_unseen_slots_is_never_read(native, normal):
    keys = make_keys()
    q, k_pages, v_pages = normal(len(LENGTHS), 6, 64), normal(SLOTS, 2, 64), normal(SLOTS, 2, 64)
    clean = native.attention(q, k_pages, v_pages, keys, 0.125, window=50)
    seen = {slot for row in range(len(LENGTHS)) for slot in row_keys(keys, row)[-50:]}
    unseen = [slot for slot in range(SLOTS) if slot not in seen]
    k_pages[unseen] = v_pages[unseen] = torch.nan
    assert torch.equal(native.attention(q, k_pages, v_pages, keys, 0.125, window=50), clean)


def test_threads_change_no_bit(normal):
    keys = make_keys()
    q, k_pages, v_pages = normal(len(LENGTHS), 6, 64), normal(SLOTS, 2, 64), normal(SLOTS, 2, 64)
    outs = [make("native", threads).attention(q, k_pages, v_pages, keys, 0.125) for threads in (1, 2, 5)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
