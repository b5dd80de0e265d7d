"""Graphs of a padded pass: what is copied into them, when one is captured, and that a replay has the bits of a run."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.kernels.graph_pool import GraphPool
from outrider.models.batch import BatchBuilder
from outrider.models.graph import OWN_BYTES, PassGraphs, _Captured, bucket
from outrider.models.target import Target
from tests.models.tiny import make_module, make_target, make_tokenizer

BLOCK = 4
WIDTH = 8


class CountedPool(GraphPool):
    """A device on which every graph takes `OWN_BYTES`."""

    def __init__(self, most: int):
        super().__init__()
        self.limit = most * OWN_BYTES + OWN_BYTES // 2  # the rest for what graphs read
        self.alive = weakref.WeakSet()

    def _free(self, device):
        return (1000 - len(self.alive)) * OWN_BYTES


class Replayed(PassGraphs):
    """Captures by keeping the call, so that what reaches a graph's own tensors is seen on a machine without a GPU."""

    def __init__(self, pool=None):
        super().__init__(pool)
        self.captures = 0

    def _capture(self, run, static, pages):
        self.captures += 1
        output = run(static, pages)
        known = weakref.ref(pages)  # a graph keeps addresses, not pages

        def replay():
            logits, tapped = run(static, known())
            output[0].copy_(logits)
            for layer, states in tapped.items():
                output[1][layer].copy_(states)

        captured = _Captured(SimpleNamespace(replay=replay), output, static)
        if isinstance(self.pool, CountedPool):
            self.pool.alive.add(captured)
        return captured


def passes(device="cpu"):
    """Two prompts of one batch, a tree, a long table, and rows whose logits nobody asks for."""
    first = BatchBuilder(BLOCK)
    first.request([1, 2])
    first.line(0, [5, 6, 7, 8, 9], 1)
    first.request([3])
    first.line(0, [10, 11], 2)
    tree = BatchBuilder(BLOCK)
    tree.request([1, 2, 7])
    tree.line(5, [12], 1)
    tree.tree(6, [13, 14, 15], [-1, -1, 1], [28, 29, 30])
    tree.request([3])
    tree.line(2, [16], 0)
    wide = BatchBuilder(BLOCK)
    wide.request([4 + i % 3 for i in range(70)])
    wide.node(17, 200, [31])
    silent = BatchBuilder(BLOCK)
    silent.request([3])
    silent.line(3, [18], 0)
    return [builder.build(torch.device(device)) for builder in (first, tree, wide, silent)]


def crowd():
    """More requests than a pass has rows."""
    builder = BatchBuilder(BLOCK)
    for number in range(WIDTH + 3):
        builder.request([1 + number % 9])
        builder.line(0, [5 + number, 6], 1)
    return builder.build(torch.device("cpu"))


def outputs(target: Target, batches):
    pages = target.make_pages(40)
    found = [target.forward(batch, pages, taps=(0, 2)) for batch in batches]
    return [found_part for out in found for found_part in (out.logits, *out.taps.values())], pages


@pytest.fixture
def target():
    return replace(make_target(make_module("llama", max_position_embeddings=400)), fixed_width=WIDTH)


def test_a_replay_gives_what_the_pass_gives(target):
    batches = [*passes(), crowd()]
    plain, pages = outputs(target, batches)
    target.model.graphs = Replayed()
    for _ in range(2):  # captured in the first round, replayed over other numbers in the second
        replayed, own = outputs(target, batches)
        assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
        assert all(torch.equal(a[4:], b[4:]) for a, b in zip(pages.keys, own.keys, strict=True))


def test_few_graphs_serve_all_passes_and_go_with_their_pages(target):
    target.model.graphs = graphs = Replayed()
    pages = target.make_pages(40)
    for _ in range(3):
        for batch in passes():
            target.forward(batch, pages)
    assert graphs.captures == 3, "with logits, over a long table, and without logits"
    del pages
    assert len(graphs._shelves) == 0


def test_ranks_run_passes_of_one_width_whoever_has_a_graph_of_them():
    """Each of them waits for the others' rows, those that only fill a pass included."""
    model = make_target(make_module("llama", max_position_embeddings=400))
    pages, widths, expected = model.make_pages(300), [], []
    ways = {"captured": Replayed(), "refused": PassGraphs(CountedPool(0)), "closed": PassGraphs()}
    ways["closed"].pool.limit = 0
    for batch in passes():
        size = bucket(batch.num_rows)
        for graphs in ways.values():
            graphs.pads = True

            def run(given, owner):
                widths.append(given.num_rows)
                return given.tokens[:, None] * 2 + given.positions[:, None] + given.keys.length[:, None], {}

            found = graphs("any", run, batch, pages, size)[0][: batch.num_rows]
            expected.append(torch.equal(found, run(batch, pages)[0]))
            assert set(widths[:-1]) == {size}
            widths.clear()
    assert all(expected)


def test_results_outlive_the_next_pass(target):
    target.model.graphs = Replayed()
    pages = target.make_pages(40)
    first, tree, *_ = passes()
    out = target.forward(first, pages, taps=(1,))
    logits, states = out.logits.clone(), out.taps[1].clone()
    target.forward(tree, pages, taps=(1,))
    assert torch.equal(out.logits, logits)
    assert torch.equal(out.taps[1], states)


def test_a_module_that_cannot_be_captured_runs_as_it_is_and_says_so(target):
    class Failing(PassGraphs):
        def _capture(self, run, static, pages):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    batches = passes()
    plain, _ = outputs(target, batches)
    target.model.graphs = Failing()
    eager, _ = outputs(target, batches)
    assert all(torch.equal(a, b) for a, b in zip(plain, eager, strict=True))
    (note,) = target.all_notes
    assert "operation not permitted when stream is capturing" in note
    assert "more" not in note


def test_running_out_of_memory_costs_one_graph_and_not_all(target):
    class Full(Replayed):
        def _warm_up(self, run, static, owner):
            if static.keys.tables.shape[1] > 64:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return 0

    batches = passes()
    plain, _ = outputs(target, batches)
    target.model.graphs = graphs = Full()
    for _ in range(2):
        found, _ = outputs(target, batches)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert graphs.captures == 4, "in each round all but the one over a long table"
    (note,) = target.all_notes
    assert "no memory left" in note


def test_where_memory_is_short_only_passes_without_a_graph_run_slower(target):
    class Large(Replayed):
        def _warm_up(self, run, static, owner):
            return (static.num_rows > 6) * OWN_BYTES

    pool = CountedPool(1)
    target.model.graphs = graphs = Large(pool)
    batches = passes()
    plain, _ = outputs(target, batches)
    for _ in range(2):
        found, _ = outputs(target, batches)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert graphs.captures == 0
    (note,) = target.all_notes
    assert "one of 8 rows may take 16 MiB and 12 MiB are planned for all" in note


def test_graphs_that_were_used_longest_ago_give_way_and_what_the_pool_holds_is_counted(target):
    pool = CountedPool(2)
    target.model.graphs = graphs = Replayed(pool)
    first, _, wide, silent = passes()
    pages = target.make_pages(40)
    for batch in (first, silent, first, wide, first, silent):  # silent gives way to wide, and wide to silent
        target.forward(batch, pages)
    assert graphs.captures == 4
    assert len(pool.alive) == 2
    assert pool.held == pytest.approx(2 * OWN_BYTES, rel=0.01)
    assert pool.held > 2 * OWN_BYTES, "with the tensors that they read"
    del pages
    assert pool.has_room(2 * OWN_BYTES), "what went with its pages is free again"
    assert graphs.note is None


def test_a_pool_is_shared_and_closed_while_memory_is_planned(target):
    pool = CountedPool(1)
    target.model.graphs = graphs = Replayed(pool)
    pages, batch = target.make_pages(40), passes()[0]
    with pool.closed():
        target.forward(batch, pages)
    assert (graphs.captures, graphs.note, pool.limit) == (0, None, 1.5 * OWN_BYTES)
    target.forward(batch, pages)
    assert graphs.captures == 1
    target.model.graphs = other = Replayed(pool)
    target.forward(batch, pages)
    assert (graphs.captures, other.captures) == (1, 0), "the other's are not given up for it"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "gpt2", "qwen3_moe"])
def test_on_a_gpu_a_replay_has_the_bits_of_the_eager_pass(name):
    from outrider.kernels import select
    from outrider.models.loader import assemble
    from outrider.models.module import ModuleModel

    device = torch.device("cuda")
    module = make_module(name, torch.bfloat16, max_position_embeddings=400).to(device)
    kernels = select("auto", device)
    body = ModuleModel(module, kernels)
    tokenizer = make_tokenizer()
    target = assemble(
        "tiny", body, "bfloat16", device, kernels, tokenizer, module.config, module.generation_config, pass_width=WIDTH
    )
    batches = passes(device)
    graphs, body.graphs = body.graphs, None
    eager, pages = outputs(target, batches)
    body.graphs = graphs
    for _ in range(2):
        replayed, own = outputs(target, batches)
        assert graphs.note is None
        assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
        assert all(torch.equal(a[4:], b[4:]) for a, b in zip(pages.keys, own.keys, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_company_and_guesses_change_no_token(tmp_path):
    from outrider import LLM, SamplingParams

    make_module("gemma2", torch.bfloat16, max_position_embeddings=400).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    settings = {"device": "cuda", "max_context": 300, "num_slots": 16000, "pass_width": 64}
    llm = LLM(str(tmp_path), drafter="none", **settings)
    assert (llm.resolved.kernels, llm.resolved.way, llm.resolved.fixed_width) == ("triton", "module", 64)
    assert llm.resolved.exactness == "seed"
    assert llm.resolved.notes == ()
    prompts = [[3 + i, 5, 7 + i] * (i + 1) for i in range(12)]
    params = [SamplingParams(seed=i, temperature=(0.0, 0.7, 1.0)[i % 3], max_tokens=60) for i in range(12)]
    together = [result.token_ids for result in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, param)[0].token_ids for prompt, param in zip(prompts, params, strict=True)]
    assert together == alone
    guessing = LLM(str(tmp_path), drafter="ngram", **settings)
    with guessing.always_guessing(4):
        assert [result.token_ids for result in guessing.generate(prompts, params)] == together
