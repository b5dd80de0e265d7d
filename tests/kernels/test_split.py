"""Split attention: how a call is cut among programs, and that no cut changes a bit."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.kernels.base import KeyIndex
from tests.gpu.passes import random_pass
from tests.kernels.conftest import make
from tests.kernels.test_attention import BLOCK, SLOTS, assert_near, dense, row_keys

attention = pytest.importorskip("outrider.kernels.triton.attention", reason="Triton is not installed")

HEADS, KV_HEADS, DIM = 2, 1, 128
PARENTS = (-1, -1, 0, 0, 2, 4)


def tree_keys(known: int, parents: tuple[int, ...] = PARENTS) -> KeyIndex:
    """One request: the row of its last known token, then a tree whose nodes lie behind it."""
    table = torch.randperm(SLOTS // BLOCK, generator=torch.Generator().manual_seed(8))[:30].int()
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        x = known + node
        paths.append([*(paths[parent] if parent >= 0 else []), int(table[x // BLOCK]) * BLOCK + x % BLOCK])
    depth = max(map(len, paths))
    tails = torch.tensor([[0] * depth, *(path + [0] * (depth - len(path)) for path in paths)], dtype=torch.int32)
    length = torch.tensor([known, *(known + len(path) for path in paths)], dtype=torch.int32)
    linear = torch.full_like(length, known)
    return KeyIndex(table[None], torch.zeros_like(length), linear, tails, length, BLOCK)


def part_of(keys: KeyIndex, rows: list[int]) -> KeyIndex:
    return KeyIndex(
        keys.tables, keys.request[rows], keys.linear[rows], keys.tails[rows], keys.length[rows], keys.block_size
    )


@pytest.fixture(autouse=True, scope="module")
def _as_on_a_gpu() -> None:
    make("triton")


@pytest.fixture
def tensors(normal):
    return normal(7, HEADS, DIM), normal(SLOTS, KV_HEADS, DIM), normal(SLOTS, KV_HEADS, DIM)


def attend(q, k, v, keys, *, tile=None, **options):
    options = {"window": None, "softcap": None, "sinks": None, **options}
    return attention.attend(q, k, v, keys, DIM**-0.5, out=None, tile=tile, **options)


@pytest.mark.parametrize("known", [5, 128, 130, 300])
def test_a_tree_is_as_its_rows_alone(tensors, known):
    """Before, at and behind the edge of a part, and where a path crosses one."""
    q, k, v = tensors
    keys = tree_keys(known)
    together = attend(q, k, v, keys)
    for row in range(7):
        assert torch.equal(attend(q[[row]], k, v, part_of(keys, [row])), together[[row]])
    torch.testing.assert_close(together.double(), dense(q, k, v, keys, DIM**-0.5), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"window": 40}, {"window": 140, "softcap": 2.0}], ids=str
)
def test_a_wide_tile_reads_the_common_prefix_for_all_of_its_rows(tensors, options):
    """NumPy's products differ by the tile, in the last place; that a GPU's do not is for a GPU to say."""
    q, k, v = tensors
    keys = tree_keys(300)
    expected = attend(q, k, v, keys, **options)
    k, v = k.bfloat16().float(), v.bfloat16().float()
    for pages in (torch.float32, torch.bfloat16):
        narrow, wide = (attend(q, k.to(pages), v.to(pages), keys, tile=tile, **options) for tile in (16, 64))
        torch.testing.assert_close(wide, narrow, atol=1e-6, rtol=1e-5)
    assert not torch.equal(narrow, expected)


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"window": 77, "sinks": True}], ids=str)
def test_neither_chunks_nor_slices_change_a_bit(tensors, monkeypatch, options):
    q, k, v = tensors
    keys = tree_keys(301)
    options = {**options, **({"sinks": torch.tensor([0.3, -1.0])} if options else {})}
    expected = attend(q, k, v, keys, **options)
    assert attention.choose(7, HEADS, KV_HEADS, 16, False).unit == 1
    for unit in (2, 4):
        assert torch.equal(attend(q, k, v, keys, unit=unit, **options), expected), unit
    monkeypatch.setattr(attention, "WORKSPACE", 1)
    monkeypatch.setattr(attention, "WIDE_TILE", 16)  # the fewest rows of a slice
    short, many = tree_keys(9), [index % 7 for index in range(18)]
    sliced = attend(q[many], k, v, part_of(short, many), **options)
    assert torch.equal(sliced, attend(q, k, v, short, **options)[many])


def test_strangers_and_rows_that_fill_a_pass_are_alone_in_a_tile(tensors):
    """Rows of two requests side by side, and one with a single key of nobody's."""
    q, k, v = tensors
    one, other = tree_keys(140), tree_keys(77)
    keys = KeyIndex(
        torch.cat([one.tables, other.tables.flip(1)]),
        *(
            torch.cat([getattr(one, name)[:3], getattr(other, name)[:3], getattr(one, name)[:1]])
            for name in ("request", "linear", "tails", "length")
        ),
        BLOCK,
    )
    keys.request[3:6] = 1
    keys.linear[6], keys.length[6], keys.tails[6] = 0, 1, 0
    for tile in (16, 64):
        out = attend(q, k, v, keys, tile=tile)
        torch.testing.assert_close(out.double(), dense(q, k, v, keys, DIM**-0.5), atol=3e-6, rtol=1e-5)
    narrow = attend(q, k, v, keys)
    for row in range(7):
        assert torch.equal(attend(q[[row]], k, v, part_of(keys, [row])), narrow[[row]])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_rows_of_any_pass_are_as_alone(monkeypatch, seed):
    """Prompts, trees, batches and filling rows together, in parts of 16 keys; a GPU runs the like."""
    for name in ("MOST_KEYS", "LEAST_KEYS"):
        monkeypatch.setattr(attention, name, 16)
    rng = random.Random(seed)
    keys = random_pass(rng, 110, SLOTS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = rng.choice([(2, 1), (4, 2), (3, 1), (2, 2)])
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    q = torch.randn(len(keys.length), heads, 16, generator=generator)
    k, v = (torch.randn(SLOTS, kv_heads, 16, generator=generator).to(dtype) for _ in range(2))
    told = {"window": rng.choice([None, 7, 33]), "softcap": rng.choice([None, 2.0])}
    cuts = [(tile, rng.choice([1, 2, 4])) for tile in (16, 64)]
    told["sinks"] = rng.choice([None, torch.randn(heads, generator=generator)])
    outs = [attention.attend(q, k, v, keys, 0.25, **told, out=None, tile=tile, unit=unit) for tile, unit in cuts]
    for out in outs:
        assert_near(out, "triton", q, k, v, keys, 0.25, **told)
    row = rng.randrange(len(keys.length))
    alone = attention.attend(q[[row]], k, v, part_of(keys, [row]), 0.25, **told, out=None, unit=rng.choice([1, 2, 4]))
    assert torch.equal(alone, outs[0][[row]])


def test_what_lies_in_unseen_slots_is_never_read(tensors):
    q, k, v = tensors
    keys = tree_keys(150)
    clean = attend(q, k, v, keys, window=50)
    seen = {slot for row in range(7) for slot in row_keys(keys, row)[-128:]}
    unseen = [slot for slot in range(SLOTS) if slot not in seen]
    k[unseen] = v[unseen] = torch.nan
    assert torch.equal(attend(q, k, v, keys, window=50), clean)


def test_what_is_wanted_in_16_bits_is_rounded_on_its_way_out(tensors):
    q, k, v = tensors
    keys = tree_keys(20)
    told = (DIM**-0.5, None, None, None)
    narrow = torch.empty(7, HEADS, DIM, dtype=torch.bfloat16)
    assert attention.attend(q, k, v, keys, *told, narrow) is narrow
    assert torch.equal(narrow, attention.attend(q, k, v, keys, *told, None).bfloat16())


def test_a_card_is_filled_and_no_more():
    """The shape of an 8B: 32 heads, 8 key-value heads of 128 in bfloat16."""
    part = attention.part_keys(128, torch.bfloat16)
    for context in (1024, 32768):
        for num_rows in (1, 16, 64, 512):
            split = attention.choose(num_rows, 4, 8, context // part, True)
            tiles = -(-num_rows // 16) if num_rows > 1 else 0
            programs = 8 * (tiles * split.tile_lanes + num_rows * split.row_lanes)
            assert 128 <= programs <= 1024 + 8 * (tiles + num_rows), (context, num_rows)
    assert attention.choose(1, 4, 8, 16, True).unit == 1
    # A tree's rows have but their own ends for themselves; requests side by side have everything.
    assert attention.choose(16, 4, 8, 17, True, tails=2).row_lanes == 2
    assert (
        attention.choose(16, 4, 8, 17, True).row_lanes == attention.choose(16, 4, 8, 17, True, tails=9).row_lanes == 4
    )
    assert [attention.choose(64, 4, 8, parts, True).unit for parts in (3, 17, 512)] == [1, 4, 16]


@pytest.mark.parametrize(
    ("rows", "group", "kv_heads", "parts", "is_wide"),
    [(4, 4, 8, 17, False), (5, 4, 8, 17, True), (16, 4, 8, 15, False), (16, 3, 3, 8, False), (512, 3, 3, 8, True)],
)
def test_wide_tiles_serve_rows_that_fill_a_card_with_them(rows, group, kv_heads, parts, is_wide):
    assert attention._fills(rows, group, kv_heads * parts) == is_wide


@pytest.mark.parametrize("error", [0.0, 1e-7])
def test_a_device_whose_tiles_differ_is_found_out(monkeypatch, error):
    monkeypatch.setattr(attention, "attend", lambda q, *rest: q + error * (rest[-2] == attention.WIDE_TILE))
    assert attention.tiles_differ(torch.device("cpu")) == bool(error)
