"""On a GPU: what the kernels of a cycle take for the shape of an 8B; prints a table (`pytest -m gpu -s`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import nn

from outrider.kernels import select
from outrider.kernels.packing import quantise_outputs
from outrider.kernels.tree import PageTable, Trees
from outrider.sampling.context import Context
from outrider.sampling.rows import told
from outrider.tree import DraftTree
from tests.gpu import passes
from tests.laws import make

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
LAYERS = 32
VOCAB = 128_256
REPLAYS = 20


@pytest.fixture(scope="module")
def kernels():
    return select("triton", GPU)


def microseconds(run: Callable[[int], object], calls: int) -> float:
    """Of one of `calls` calls that follow one another in a CUDA graph; the median of 20 replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in range(2):
            run(call % calls)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(call)
    times = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1000 / calls)
    return statistics.median(times)


def tell(name: str, took: float, more: str = "") -> None:
    print(f"  {name:<58} {took:9.1f} us  {more}")


@pytest.mark.parametrize("context", [1024, 32768])
def test_attention(kernels, context):
    """Layer after layer, so that keys come from memory as in a pass; beside torch's own, which keeps no bits."""
    layers = LAYERS if context <= 4096 else 4
    pages = passes.random_pages(layers, passes.num_slots(1, context + 2048), GPU)
    contiguous = [(k[None, :context].transpose(1, 2), v[None, :context].transpose(1, 2)) for k, v in _pairs(pages)]
    read = 2 * context * passes.KV_HEADS * passes.DIM * 2
    print(f"\n{torch.cuda.get_device_name()}: attention of a layer, context {context:,}")
    cases = {f"tree of {n} rows": passes.tree_pass(context, n - 1, GPU) for n in (1, 2, 8, 16, 32, 64, 128)}
    cases["chain of 16 rows"] = passes.tree_pass(context, 15, GPU, range(-1, 14))
    cases |= {f"prompt of {n} rows": passes.prompt_pass(context - n, n, GPU) for n in (512, 1024)}
    for name, batch in cases.items():
        q = passes.queries(batch.num_rows, GPU)
        out = torch.empty_like(q)

        def run(call, batch=batch, q=q, out=out):
            scale = passes.DIM**-0.5
            kernels.attention(q, pages.keys[call], pages.values[call], batch.keys, scale, out=out)

        took = microseconds(run, layers)
        tell(name, took, f"{read / took / 1e6:6.2f} TB/s of keys and values")
    for rows in (1, 16, 64):
        q = passes.queries(rows, GPU).bfloat16()[None].transpose(1, 2).contiguous()

        def run_torch(call, q=q):
            nn.functional.scaled_dot_product_attention(q, *contiguous[call], enable_gqa=True)

        tell(f"torch's own, contiguous keys, {rows} rows", microseconds(run_torch, layers))


def _pairs(pages):
    return zip(pages.keys, pages.values, strict=True)


@pytest.mark.parametrize("num_requests", [8, 64])
def test_attention_of_a_batch(kernels, num_requests):
    context, layers = 1024, 4
    pages = passes.random_pages(layers, passes.num_slots(num_requests, context), GPU)
    batch, q = passes.batch_pass(context, num_requests, GPU), passes.queries(num_requests, GPU)

    def run(call):
        kernels.attention(q, pages.keys[call], pages.values[call], batch.keys, passes.DIM**-0.5)

    took = microseconds(run, layers)
    read = num_requests * 2 * context * passes.KV_HEADS * passes.DIM * 2
    print()
    tell(f"attention, {num_requests} requests of {context:,}", took, f"{read / took / 1e6:6.2f} TB/s")


def test_the_rest_of_a_cycle(kernels):
    """Draw, rank, walk and compaction; the bar for all of them at 64 nodes is 300 us."""
    print(f"\n{torch.cuda.get_device_name()}: the rest of a cycle, vocabulary {VOCAB:,}")
    for rows in (1, 17, 65):
        logits = torch.randn(rows, VOCAB, device=GPU) * 3
        for heat in (0.0, 1.0):
            keyed = _keyed(rows, heat)

            def draw(_, logits=logits, keyed=keyed):
                kernels.draw(logits, *keyed)

            tell(f"draw of {rows} rows at temperature {heat}", microseconds(draw, 10))
    for rows, columns in ((1, VOCAB), (8, VOCAB), (1, 32000), (8, 32000)):
        logits, keyed = torch.randn(rows, columns, device=GPU) * 3, _keyed(rows, 1.0)
        ids = torch.arange(columns, device=GPU) * (VOCAB // columns) if columns < VOCAB else None

        def rank(_, logits=logits, keyed=keyed, ids=ids):
            kernels.rank(logits, 9, *keyed, ids)

        tell(f"9 best of {rows} rows of {columns:,} columns", microseconds(rank, 10))
    nodes = 64
    tokens = torch.arange(nodes, device=GPU)
    parents = torch.tensor(passes.parents_of(nodes), dtype=torch.int32, device=GPU)
    first = torch.tensor([0, nodes], dtype=torch.int32, device=GPU)
    trees = Trees(tokens, parents, first, first[:1], nodes, 16)
    draws = torch.tensor([0, *(3 * node + 3 for node in range(nodes))], device=GPU)  # the first child, always
    walks = kernels.walk(draws, trees)
    tell("walk of a tree of 64", microseconds(lambda _: kernels.walk(draws, trees), 10), f"{int(walks.counts[0])} deep")
    pages = passes.random_pages(LAYERS, 4096, GPU)
    table, slots = PageTable.of([*pages.keys, *pages.values]), torch.randperm(4096, device=GPU)[:nodes].int()
    took = microseconds(lambda _: kernels.compact(table, slots, trees, walks), 10)
    tell(f"compaction of its path in {LAYERS} layers", took)


@pytest.mark.parametrize("rows", [1, 17, 65])
def test_a_head_that_draws(kernels, rows):
    """Beside the same head and the draw of its logits, at T = 0 and T = 1; and by weights of 8 bits."""
    generator = torch.Generator(GPU).manual_seed(3)
    weight = torch.randn(VOCAB, passes.HEADS * passes.DIM, device=GPU, generator=generator).bfloat16()
    x = torch.randn(rows, weight.shape[1], device=GPU, generator=generator) / 64
    heads = {
        "bfloat16": kernels.pack(weight),
        "int8": kernels.pack_quantised("int8", *quantise_outputs(weight), None),
    }
    print(f"\n{torch.cuda.get_device_name()}: a head of {VOCAB:,} x {weight.shape[1]:,}, {rows} rows")
    for name, head in heads.items():
        tell(f"{name}, logits", microseconds(lambda _, head=head: head(x), 5), f"{head.nbytes / 1e9:.2f} GB")
        for heat in (0.0, 1.0):
            keyed = _keyed(rows, heat)
            assert torch.equal(head.draw(x, *keyed), kernels.draw(head(x), *keyed))

            def apart(_, head=head, keyed=keyed):
                kernels.draw(head(x), *keyed)

            def fused(_, head=head, keyed=keyed):
                head.draw(x, *keyed)

            tell(f"{name}, logits and their draw at temperature {heat}", microseconds(apart, 5))
            tell(f"{name}, one draw at temperature {heat}", microseconds(fused, 5))


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_weights_of_8_bits(kernels, rows):
    """The linears of an 8B's layer by bfloat16 and by 8 bits, each of four layers' weights in turns."""
    print(f"\n{torch.cuda.get_device_name()}: linears of a layer, {rows} rows")
    for name, shape in {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    }.items():
        x = torch.randn(rows, shape[1], device=GPU).bfloat16()
        weights = [torch.randn(*shape, device=GPU).bfloat16() for _ in range(4)]
        for kind in ("bfloat16", "int8"):
            if kind == "int8":
                linears = [kernels.pack_quantised(kind, *quantise_outputs(weight), None) for weight in weights]
            else:
                linears = [kernels.pack(weight) for weight in weights]

            def run(call, linears=linears, x=x):
                linears[call](x)

            took = microseconds(run, len(linears))
            more = f"{linears[0].nbytes / took / 1e6:6.2f} TB/s"
            tell(f"{name} {shape}, {kind}", took, more)


def _keyed(rows: int, heat: float):
    numbers = torch.arange(rows, dtype=torch.int32, device=GPU)
    return torch.full((rows,), heat, device=GPU), numbers.long() << 33, numbers, numbers


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_warp(kernels, rows):
    """Of a chain with top-p and penalties, alone on the device: with the draw it may take 0.6 ms for 64 rows."""
    fields = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2}
    context = Context(make(**fields), VOCAB, GPU, kernels)
    logits = torch.randn(rows, VOCAB, device=GPU) * 3
    warps = told(range(rows), context.rows(DraftTree.chain(list(range(rows - 1)))), VOCAB, GPU)
    none = torch.zeros(rows, dtype=torch.int32, device=GPU)
    keyed = torch.ones(rows, device=GPU), none.long(), none, none
    warped = microseconds(lambda call: kernels.warp(logits, warps), 8)
    drawn = microseconds(lambda call: kernels.draw(kernels.warp(logits, warps), *keyed), 8)
    tell(f"warp of {rows} rows of {VOCAB:,}, alone and with the draw", warped, f"{drawn:9.1f} us")
    assert drawn <= 600
