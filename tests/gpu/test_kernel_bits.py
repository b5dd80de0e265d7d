"""On a GPU: attention's rows have their bits whatever the tile, the split and the company; all verbs fit in a graph."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.cache.pages import Pages, PageSpec
from outrider.kernels import select
from outrider.kernels.plain import PlainKernels
from outrider.kernels.tree import PageTable, Trees
from outrider.sampling.context import Context
from outrider.sampling.rows import warp_rows
from outrider.sampling.warp import warp
from outrider.tree import DraftTree
from tests.gpu import passes
from tests.kernels.test_tree import a_pass, flat
from tests.laws import make

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
SCALE = passes.DIM**-0.5


@pytest.fixture(scope="module")
def kernels():
    return select("triton", GPU)


@pytest.fixture(scope="module")
def attention():
    return pytest.importorskip("outrider.kernels.triton.attention")


def moved(trees: Trees) -> Trees:
    parts = (part.to(GPU) for part in (trees.tokens, trees.parents, trees.first, trees.starts))
    return Trees(*parts, trees.most_nodes, trees.depth)


def assert_near_plain(out, q, k, v, *told, **options):
    """As the plain twin has it of rounded queries; weights are rounded, too (tests/kernels/test_attention.py)."""
    plain, bound = PlainKernels(GPU), 0.0
    if k.dtype == torch.bfloat16:
        q = q.bfloat16().float()
        bound = 2**-8 * plain.attention(q, k, v.abs(), *told, **options)
    expected = plain.attention(q, k, v, *told, **options)
    assert ((out - expected).abs() <= bound + 2e-5 + 1e-4 * expected.abs()).all()


@pytest.mark.parametrize("options", [{}, {"window": 700}, {"softcap": 3.0, "window": 100}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("context", [1, 63, 64, 1000, 5000])
def test_rows_of_a_tree_have_the_bits_they_have_alone(kernels, attention, context, dtype, options):
    """By tiles of 64 and of 16 queries, all together, some of them, and one by one."""
    batch = passes.tree_pass(context, 63, GPU)
    pages = passes.random_pages(1, passes.num_slots(1, context), GPU, dtype)
    q, k, v = passes.queries(64, GPU), pages.keys[0], pages.values[0]
    together = kernels.attention(q, k, v, batch.keys, SCALE, **options)
    told = (options.get("window"), options.get("softcap"), None, None)
    for tile in (16, 64):
        assert torch.equal(attention.attend(q, k, v, batch.keys, SCALE, *told, tile=tile), together)
    for rows in ([0], [1], [63], [40, 2], list(range(17)), list(range(63, -1, -1))):
        out = kernels.attention(q[rows], k, v, passes.part_of(batch.keys, rows), SCALE, **options)
        assert torch.equal(out, together[rows]), rows
    assert_near_plain(together, q, k, v, batch.keys, SCALE, **options)


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_any_pass_have_the_bits_they_have_alone(attention, seed):
    """Prompts, trees, batches and filling rows together; by both tiles, in parts and in chunks; and a dense softmax."""
    rng, slots = random.Random(seed), 8192
    keys = passes.random_pass(rng, 700, slots, GPU)
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim = rng.choice([(8, 2, 128), (9, 3, 64), (4, 4, 80), (8, 1, 256), (12, 2, 96)])
    dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float32])
    q = torch.randn(len(keys.length), heads, dim, generator=generator).to(GPU)
    k, v = (torch.randn(slots, kv_heads, dim, generator=generator).to(dtype).to(GPU) for _ in range(2))
    sinks = rng.choice([None, torch.randn(heads, generator=generator).to(GPU)])
    told = (dim**-0.5, rng.choice([None, 7, 300]), rng.choice([None, 2.0]), sinks, None)
    outs = []
    for tile in (16, 64):
        for unit in (1, 4, 16):
            outs.append(attention.attend(q, k, v, keys, *told, tile, unit=unit))
    assert all(torch.equal(out, outs[0]) for out in outs)
    for row in range(len(keys.length)):
        assert torch.equal(attention.attend(q[[row]], k, v, passes.part_of(keys, [row]), *told), outs[0][[row]])
    assert_near_plain(outs[0], q, k, v, keys, *told)


def test_neither_chunks_nor_slices_change_a_bit(kernels, attention, monkeypatch):
    pages = passes.random_pages(1, passes.num_slots(1, 3000), GPU)
    q = passes.queries(64, GPU)
    for batch in (passes.tree_pass(3000, 63, GPU), passes.prompt_pass(2936, 64, GPU)):
        arguments = q, pages.keys[0], pages.values[0], batch.keys, SCALE
        expected = kernels.attention(*arguments)
        for unit in (1, 4, 16):
            assert torch.equal(attention.attend(*arguments, None, None, None, None, unit=unit), expected)
    batch = passes.prompt_pass(0, 700, GPU)
    q = passes.queries(700, GPU)
    expected = kernels.attention(q, *arguments[1:3], batch.keys, SCALE)
    monkeypatch.setattr(attention, "WORKSPACE", 1)
    assert torch.equal(kernels.attention(q, *arguments[1:3], batch.keys, SCALE), expected)


def test_a_prompts_rows_have_the_bits_of_decoding(kernels):
    """Prefill in tiles, and each row on its own through a wider table, as a decode pass has it."""
    batch = passes.prompt_pass(500, 1200, GPU)
    pages = passes.random_pages(1, passes.num_slots(1, 1700), GPU)
    q, k, v = passes.queries(1200, GPU), pages.keys[0], pages.values[0]
    together = kernels.attention(q, k, v, batch.keys, SCALE)
    for row in (0, 15, 16, 300, 779, 1199):
        alone = passes.part_of(batch.keys, [row])
        assert torch.equal(kernels.attention(q[[row]], k, v, alone, SCALE), together[[row]])


def test_a_batchs_rows_have_the_bits_they_have_alone(kernels):
    batch = passes.batch_pass(900, 64, GPU)
    pages = passes.random_pages(1, passes.num_slots(64, 900), GPU)
    q, k, v = passes.queries(64, GPU), pages.keys[0], pages.values[0]
    together = kernels.attention(q, k, v, batch.keys, SCALE)
    for rows in ([0], [63], [5, 6, 7], list(range(30, 50))):
        out = kernels.attention(q[rows], k, v, passes.part_of(batch.keys, rows), SCALE)
        assert torch.equal(out, together[rows])


@pytest.mark.parametrize("vocab", [50, 32000, 128256])
def test_ranks_and_draws_of_large_vocabularies_are_the_plain_twins(kernels, vocab):
    rows = 9
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(GPU)
    warm = torch.tensor([0.0, 1.0, 0.6, 0.0, 0.0, 2.0, 1.0, 0.01, 50.0], device=GPU)
    seeds = torch.arange(rows, device=GPU) << 40
    samples, positions = torch.arange(rows, device=GPU).int(), torch.arange(rows, device=GPU).int() * 1000
    keyed = warm, seeds, samples, positions
    plain = PlainKernels(GPU)
    assert torch.equal(kernels.draw(logits, *keyed), plain.draw(logits, *keyed))
    ids = torch.randperm(2 * vocab, generator=generator)[:vocab].sort()[0].to(GPU)
    for kept in (None, ids):
        ours, theirs = kernels.rank(logits, 33, *keyed, kept), plain.rank(logits, 33, *keyed, kept)
        assert torch.equal(ours[1], theirs[1])
        torch.testing.assert_close(ours[0], theirs[0], atol=1e-12, rtol=1e-14)
        torch.testing.assert_close(ours[2], theirs[2], atol=1e-5, rtol=0)
    tied = logits[3:5].round()
    by_column = tied.sort(dim=1, descending=True, stable=True)[1][:, :33]
    cold = (torch.zeros(2, device=GPU), *(column[3:5] for column in (seeds, samples, positions)))
    assert torch.equal(kernels.rank(tied, 33, *cold)[1], by_column)
    assert torch.equal(kernels.draw(tied, *cold), by_column[:, 0])


def test_walks_and_compactions_are_the_plain_twins(kernels):
    for seed in range(20):
        trees, starts, draws = a_pass(random.Random(seed), 6)
        whole = flat(trees, starts)
        plain = PlainKernels(torch.device("cpu"))
        expected = plain.walk(torch.tensor(draws), whole)
        walks = kernels.walk(torch.tensor(draws, device=GPU), moved(whole))
        for name in ("counts", "paths", "said"):
            assert torch.equal(getattr(walks, name).cpu(), getattr(expected, name))
        there, here = (Pages([PageSpec(8, 128, 128)] * 3, 200, torch.bfloat16, d) for d in (GPU, plain.device))
        for ours, theirs in zip([*there.keys, *there.values], [*here.keys, *here.values], strict=True):
            theirs.normal_()
            ours.copy_(theirs)
        slots = torch.randperm(200)[: len(whole.tokens)].int()
        plain.compact(PageTable.of([*here.keys, *here.values]), slots, whole, expected)
        kernels.compact(PageTable.of([*there.keys, *there.values]), slots.to(GPU), moved(whole), walks)
        for ours, theirs in zip([*there.keys, *there.values], [*here.keys, *here.values], strict=True):
            assert torch.equal(ours.cpu(), theirs)


def test_everything_fits_in_a_graph(kernels):
    """Captured once; replayed over other numbers it gives what a call gives."""
    batch = passes.tree_pass(300, 15, GPU)
    pages = passes.random_pages(1, passes.num_slots(1, 300), GPU)
    table = PageTable.of([*pages.keys, *pages.values])
    q, logits = passes.queries(16, GPU), torch.randn(16, 5000, device=GPU)
    keyed = torch.ones(16, device=GPU), torch.zeros(16, dtype=torch.int64, device=GPU), *(batch.keys.request,) * 2
    tokens = torch.randint(0, 5000, (15,), device=GPU)
    first = torch.tensor([0, 15], dtype=torch.int32, device=GPU)
    parents = torch.tensor(passes.parents_of(15), dtype=torch.int32, device=GPU)
    trees = Trees(tokens, parents, first, first[:1], 15, 15)

    def run():
        mixed = kernels.attention(q, pages.keys[0], pages.values[0], batch.keys, SCALE)
        draws = kernels.draw(logits, *keyed)
        walks = kernels.walk(draws, trees)
        kernels.compact(table, batch.slots[1:], trees, walks)
        return mixed, draws, walks.said, kernels.rank(logits, 4, *keyed)[1]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    q.normal_()
    logits.normal_()
    drawn = kernels.draw(logits, *keyed)[[parent + 1 for parent in passes.parents_of(15)]]
    tokens.copy_(drawn + torch.arange(15, device=GPU) % 3)  # the first child of each node carries what is drawn there
    before = [page.clone() for page in (*pages.keys, *pages.values)]
    graph.replay()
    replayed = [value.clone() for value in captured]
    for page, copy in zip((*pages.keys, *pages.values), before, strict=True):  # the replay compacted a path
        page.copy_(copy)
    for ours, theirs in zip(replayed, run(), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_are_warped_to_the_bits_they_have_alone(kernels):
    """Of a whole vocabulary; what is kept is what PyTorch's operations keep on a CPU, but where rounding decides."""
    fields = {"top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2}
    logits = torch.randn(64, 128_256, generator=torch.Generator().manual_seed(3)) * torch.arange(1, 65)[:, None] / 8
    for more in ({}, {"top_k": 300}, {"min_p": 0.01, "top_p": 0.999}):
        here, there = (
            Context(make(**{"temperature": 1.0, **fields, **more}), 128_256, *told) for told in ((), (GPU, kernels))
        )
        tree = DraftTree.chain(list(range(63)))
        rows, device_logits = there.rows(tree), logits.to(GPU)
        together = warp_rows(kernels, device_logits, range(64), rows)
        for row in (0, 7, 63):
            alone = warp_rows(kernels, device_logits, (row,), (rows[row],))[0]
            assert torch.equal(alone, together[row])
            expected = warp(logits[row], here.rows(tree)[row])
            assert int(((expected > -torch.inf) != (alone.cpu() > -torch.inf)).sum()) <= 1
