"""The lean way of a GPU: its layers on Triton's kernels, passes padded to a graph's rows, and the GPU itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.kernels import select
from outrider.models.batch import BatchBuilder
from outrider.models.graph import BUCKETS
from outrider.models.lean import LeanModel
from outrider.models.loader import assemble
from tests.kernels.conftest import make_triton
from tests.models.test_architectures import BLOCK, SPARE, close, golden, text
from tests.models.test_graph import CountedPool, Replayed
from tests.models.test_lean import LEAN, line, make_pages, module_of, run
from tests.models.tiny import make_tokenizer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHORT = 10


@pytest.fixture(scope="module")
def triton():
    """In stretches of one part of keys each, as these texts have no second one: the interpreter takes as long for a
    part that is not there, and how parts are folded is tried in tests/kernels."""
    kernels = make_triton()
    from outrider.kernels.triton import attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "PARTS", 1)
        patch.setattr(attention, "CHUNKS", 1)
        yield kernels


def lean(module, kernels) -> LeanModel:
    model = LeanModel.from_module(module, kernels)
    assert model is not None
    return model


OFTEN = ("qwen2_sliding", "qwen3")
"""Of the interpreter's, which takes seconds for each; on a GPU all are tried, and so they are by the plain kernels."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in LEAN])
def test_logits_equal_transformers(name, triton):
    """A prompt, and a tree on top of it; windows of these models are shorter than the text."""
    fewer = {} if name == "smollm3" else {"num_hidden_layers": 2}
    module, tokens, nodes = module_of(name, **fewer), text()[:SHORT], text(seed=1, length=2)
    whole = golden(module, tokens)
    branches = [golden(module, [*tokens, node])[-1] for node in nodes]
    model = lean(module, triton)
    pages = make_pages(model)
    close(run(model, pages, line(0, tokens[:-1]))[0], whole[:-1])
    builder = line(SHORT - 1, tokens[-1:], 1)
    builder.tree(SHORT, nodes, [-1, -1], range(SPARE, SPARE + 2))
    close(run(model, pages, builder)[0], torch.stack([whole[-1], *branches]))


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16],
    ids=["float32", "bfloat16"],
)
def test_a_row_and_its_keys_have_the_same_bits_in_any_company(triton, dtype):
    model = lean(module_of("qwen3", dtype, num_hidden_layers=1), triton)
    tokens, dtype = text()[:18], torch.bfloat16
    once, again = make_pages(model, dtype), make_pages(model, dtype)
    whole = run(model, once, line(0, tokens))[0]
    parts = [run(model, again, line(at, tokens[at : at + size]))[0] for at, size in ((0, 1), (1, 2), (3, 14), (17, 1))]
    assert torch.equal(torch.cat(parts), whole)
    for ours, theirs in zip((*again.keys, *again.values), (*once.keys, *once.values), strict=True):
        assert torch.equal(ours, theirs)
    builder = line(14, tokens[14:15], 1)
    builder.tree(15, [9, tokens[15], tokens[16], 8, tokens[17]], [-1, -1, 1, 1, 2], range(SPARE, SPARE + 5))
    logits = run(model, once, builder)[0]
    assert torch.equal(logits[[0, 2, 3, 5]], whole[-4:])


def test_numerics_in_bfloat16_say_what_is_rounded_and_stay_near_the_plain_twin(triton):
    module, tokens = module_of("llama", torch.bfloat16), text()[:SHORT]
    ours, twin = lean(module, triton), lean(module, select("plain", CPU))
    assert ours.numerics == "bfloat16 weights against bfloat16 activations, summed in float32 (triton kernels)"
    assert twin.numerics == "bfloat16 weights, summed in float32 (plain kernels)"
    logits, expected = (run(model, make_pages(model), line(0, tokens))[0] for model in (ours, twin))
    assert 0 < float((logits - expected).std() / expected.std()) < 0.02


def passes():
    """As they come: a prompt, a tree beside another request, fewer rows, a prompt that tells nothing, wide rows."""
    tokens = text()
    tree = line(5, tokens[5:6], 1)
    tree.tree(6, [7, 8, 9], [-1, -1, 1], range(SPARE, SPARE + 3))
    tree.request([7])
    tree.line(0, [11, 12], 1)
    builders = [
        line(0, tokens[:5], 1),
        tree,
        line(6, tokens[6:7], 1),
        line(7, tokens[7:9], 0),
        line(9, tokens[9:20], 2),
    ]
    return [builder.build(CPU) for builder in builders]


def outputs(model: LeanModel, batches, **settings):
    pages = make_pages(model)
    found = []
    for b in batches:
        logits, taps = model.forward(b.tokens, b.positions, b.slots, b.keys, pages, b.logit_rows, taps=(0,), **settings)
        found += [logits, *taps.values()]
    return found, pages


@pytest.mark.parametrize("name", ["llama", "qwen2_sliding"])
def test_passes_padded_to_their_graph_have_the_bits_of_passes_as_they_are(name):
    model = lean(module_of(name), select("plain", CPU))
    expected, pages = outputs(model, passes())
    model.graphs = graphs = Replayed()
    for _ in range(2):
        found, own = outputs(model, passes())
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        # Slot 0 belongs to nobody: rows that fill a graph write there.
        for ours, theirs in zip((*own.keys, *own.values), (*pages.keys, *pages.values), strict=True):
            assert torch.equal(ours[1:], theirs[1:])
    assert graphs.captures == 2 * len({8, 1, 2, 16})


def test_rows_beyond_the_last_bucket_run_without_a_graph(monkeypatch):
    model = lean(module_of("llama"), select("plain", CPU))
    model.graphs = graphs = Replayed()
    monkeypatch.setattr("outrider.models.graph.BUCKETS", (1, 2, 4))
    expected, _ = outputs(lean(module_of("llama"), select("plain", CPU)), passes())
    found, _ = outputs(model, passes())
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert graphs.captures == 2


def test_the_graph_that_was_used_longest_ago_gives_way():
    model = lean(module_of("llama"), select("plain", CPU))
    model.graphs = graphs = Replayed(CountedPool(2))
    pages = make_pages(model)
    for rows in (1, 2, 1, 4, 1, 2):  # 2 gives way to 4, and 4 to 2
        run(model, pages, line(0, text()[:rows]))
    assert graphs.captures == 4
    (shelf,) = graphs._shelves.values()
    assert [key[1] for key in shelf.captured] == [1, 2]


def target_on_a_gpu(name: str, dtype: torch.dtype):
    module = module_of(name, dtype, max_position_embeddings=1200).to(CUDA)
    kernels = select("triton", CUDA)
    return assemble(
        "tiny",
        lean(module, kernels),
        str(dtype).removeprefix("torch."),
        CUDA,
        kernels,
        make_tokenizer(),
        module.config,
        module.generation_config,
    )


def wide(rows: int, tokens: list[int]) -> BatchBuilder:
    """The last `rows` tokens of a text of 900 as one pass."""
    builder = BatchBuilder(BLOCK)
    builder.request(list(range(1, 900 // BLOCK + 2)))
    builder.line(900 - rows, tokens[900 - rows :], rows)
    return builder


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "llama_odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_on_a_gpu_graphs_widths_and_places_change_no_bit(name, dtype):
    """The last rows of a long text, run in passes of every bucket, under graphs and without: one canonical value."""
    target = target_on_a_gpu(name, dtype)
    assert target.fixed_width is None
    tokens = text(seed=3, length=900)
    pages = target.make_pages(1000)
    expected = target.forward(wide(900, tokens).build(CUDA), pages).logits
    keys = [page.clone() for page in (*pages.keys, *pages.values)]
    assert torch.isfinite(expected).all()
    for graphs in (target.model.graphs, None):
        target = replace(target)
        target.model.graphs = graphs
        for rows in (*BUCKETS, 3, 17, 65, 200, 257, 600):
            found = target.forward(wide(rows, tokens).build(CUDA), pages).logits
            assert torch.equal(found, expected[900 - rows :]), rows
        assert graphs is None or graphs.note is None
        for before, after in zip(keys, (*pages.keys, *pages.values), strict=True):
            assert torch.equal(before[1:], after[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("name", LEAN)
def test_on_a_gpu_logits_equal_transformers(name):
    """With the same weights in float32 on a CPU; a row near the end is moved most by whatever is wrong."""
    target, tokens = target_on_a_gpu(name, torch.float32), text()
    expected = golden(module_of(name, max_position_embeddings=1200), tokens)
    batch = line(0, tokens).build(CUDA)
    close(target.forward(batch, target.make_pages(128)).logits.cpu(), expected)


@pytest.mark.gpu
def test_on_a_gpu_company_and_guesses_change_no_token(tmp_path):
    from outrider import LLM, SamplingParams

    module_of("llama", torch.bfloat16, max_position_embeddings=400).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    settings = {"device": "cuda", "max_context": 300, "num_slots": 16000}
    llm = LLM(str(tmp_path), drafter="none", **settings)
    assert (llm.resolved.way, llm.resolved.fixed_width, llm.resolved.exactness) == ("lean", None, "seed")
    assert llm.resolved.notes == ()
    prompts = [[3 + i, 5, 7 + i] * (i + 1) for i in range(12)]
    params = [SamplingParams(seed=i, temperature=(0.0, 0.7, 1.0)[i % 3], max_tokens=60) for i in range(12)]
    together = [result.token_ids for result in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, param)[0].token_ids for prompt, param in zip(prompts, params, strict=True)]
    assert together == alone
    guessing = LLM(str(tmp_path), drafter="ngram", **settings)
    with guessing.always_guessing(4):
        assert [result.token_ids for result in guessing.generate(prompts, params)] == together
