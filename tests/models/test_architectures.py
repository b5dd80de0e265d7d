"""Every architecture against Transformers itself: plain, in chunks and as trees; and rows that mind no neighbour."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from outrider.cache.pages import Pages
from outrider.errors import ModelError
from outrider.models.batch import BatchBuilder
from outrider.models.checks import longest_context
from outrider.models.probe import check_invariance, check_reference, probe, reference
from outrider.models.target import Target
from tests.models.tiny import ARCHITECTURES, VOCAB, make_module, make_target, make_tokenizer

BLOCK = 4
TABLE = list(range(9, 0, -1))  # blocks out of order
SPARE = 40  # first slot beyond the table's blocks
LENGTH = 34
# A tree that forks twice: two branches from the root, one of which forks again.
PARENTS = [-1, -1, 0, 0, 1, 2, 3, 4, 4]


def golden(module, tokens: list[int]) -> Tensor:
    """Transformers' own logits of one text, by its own attention, in one forward."""
    with torch.inference_mode():
        return module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def path_to(node: int) -> list[int]:
    """The nodes of `PARENTS` from the root to `node`."""
    return [] if node < 0 else [*path_to(PARENTS[node]), node]


def text(seed: int = 0, length: int = LENGTH) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, VOCAB) for _ in range(length)]


def run_line(target: Target, pages: Pages, start: int, tokens: list[int], num_logits: int | None = None) -> Tensor:
    builder = BatchBuilder(BLOCK)
    builder.request(TABLE)
    builder.line(start, tokens, len(tokens) if num_logits is None else num_logits)
    return target.forward(builder.build(target.device), pages).logits


def close(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 1e-2, "logits this flat would hide a fault"
    torch.testing.assert_close(ours, theirs, atol=2e-4 * float(theirs.std()), rtol=2e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_transformers(name):
    module = make_module(name)
    tokens = text()
    nodes = text(seed=1, length=len(PARENTS))
    whole = golden(module, tokens)
    branches = [golden(module, tokens + [nodes[i] for i in path_to(node)])[-1] for node in range(len(nodes))]
    target = make_target(module)

    close(run_line(target, target.make_pages(64), 0, tokens), whole)

    pages = target.make_pages(64)
    chunks = [run_line(target, pages, start, tokens[start : start + 7]) for start in range(0, LENGTH, 7)]
    close(torch.cat(chunks), whole)

    builder = BatchBuilder(BLOCK)
    builder.request(TABLE)
    builder.line(LENGTH - 1, tokens[-1:], 1)
    builder.tree(LENGTH, nodes, PARENTS, range(SPARE, SPARE + len(nodes)))
    logits = target.forward(builder.build(target.device), pages).logits
    close(logits, torch.stack([whole[-1], *branches]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_neighbours_change_no_bit(name, dtype):
    compared, varied = check_invariance(make_target(make_module(name, dtype)))
    assert (compared > 10, varied) == (True, 0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "phi3_longrope", "gpt2"])
def test_a_row_is_the_same_in_prefill_and_among_strangers(name):
    """One text's rows: in one prefill, one by one, and mixed with a stranger's tree, with equal keys and values."""
    target = make_target(make_module(name))
    tokens, stranger = text(length=20), text(seed=5, length=9)
    alone, single, mixed = (target.make_pages(80) for _ in range(3))
    expected = run_line(target, alone, 0, tokens)
    one_by_one = [run_line(target, single, position, [token]) for position, token in enumerate(tokens)]
    builder = BatchBuilder(BLOCK)
    builder.request([18, 19])
    builder.tree(0, stranger, PARENTS, range(60, 69))
    builder.request(TABLE)
    builder.line(0, tokens, len(tokens))
    both = target.forward(builder.build(target.device), mixed).logits[len(stranger) :]

    assert torch.equal(torch.cat(one_by_one), expected)
    assert torch.equal(both, expected)
    slots = [TABLE[p // BLOCK] * BLOCK + p % BLOCK for p in range(len(tokens))]
    for layer in range(target.num_layers):
        for other in (single, mixed):
            assert torch.equal(other.keys[layer][slots], alone.keys[layer][slots])
            assert torch.equal(other.values[layer][slots], alone.values[layer][slots])


def test_a_model_that_looks_at_its_neighbours_is_found_out():
    """The probe can fail: experts by Transformers' default sum rows by who else chose the same expert."""
    module = make_module("llama")
    target = make_target(module)
    module.model.layers[1].mlp.register_forward_hook(lambda _m, _i, out: out + 1e-3 * out.mean())
    found = probe(target, None)
    # Alone in its pass a row has no neighbours: slow, and exact.
    assert (found.fixed_width, found.exactness, found.report.rows_varied) == (1, "seed", 0)
    assert len(found.notes) == 1


def test_a_model_that_does_not_repeat_itself_serves_the_law_only():
    module = make_module("llama")
    target = make_target(module)
    module.model.layers[1].mlp.register_forward_hook(lambda _m, _i, out: out + 1e-3 * torch.rand(()))
    found = probe(target, None)
    assert found.exactness == "distribution"
    assert found.report.rows_varied > 0
    assert "only the law" in found.notes[-1]


def test_free_width_falls_back_to_one_width():
    """A model whose arithmetic follows the number of rows keeps its bits at a fixed width."""
    module = make_module("llama")
    target = make_target(module)
    module.lm_head.register_forward_hook(lambda _m, _i, out: out * (1 + 1e-4 * out.shape[1]))
    target.fixed_width = None
    found = probe(target, None)
    assert (found.fixed_width, found.exactness, found.report.rows_varied) == (16, "seed", 0)
    assert "every pass runs at 16 rows" in found.notes[-1]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral", "deepseek_v3"])
def test_the_probe_accepts_what_is_right(name):
    module = make_module(name)
    expected = reference(module, VOCAB)
    found = probe(make_target(module), expected)
    assert found.report.reference_error < 1e-4
    assert found.exactness == "seed"


def test_the_probe_compares_with_transformers():
    """Attention beside the registered function (DiffLlama's second softmax) is not what a paged cache computes."""
    module = make_module("diffllama")
    expected = reference(module, VOCAB)
    with pytest.raises(ModelError, match="cannot be served: its logits are"):
        check_reference(make_target(module), expected)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("mamba", {}, "do not call the attention function"),
        ("rwkv", {}, "do not call the attention function"),
        ("jamba", {"num_experts": 2}, "do not call the attention function"),
        ("recurrent_gemma", {}, "do not call the attention function"),
        ("qwen3_next", {}, "do not call the attention function"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "do not call the attention function"),
        ("falcon_h1", {}, "of the kind 'hybrid'"),
        ("llama4_text", {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}, "'chunked_attention'"),
        ("falcon", {}, "do not call the attention function"),
        ("bloom", {}, "do not call the attention function"),
        ("stablelm", {}, "calls attention without its pass"),
        ("nemotron", {}, "calls attention without its pass"),
        ("bert", {}, "looks ahead of each token"),
        ("bart", {}, "has no list of 3 decoder layers"),
    ],
)
def test_what_cannot_be_served_is_refused(name, settings, reason):
    with pytest.raises(ModelError, match=reason) as refusal:
        make_target(make_module(name, **settings))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["phi3_longrope", "llama_dynamic"])
def test_rotary_switches_never_flip(name):
    """The context ends where the variant would start to look at the longest position of the pass."""
    module = make_module(name)
    target = make_target(module)
    limit = {"phi3_longrope": 48, "llama_dynamic": 96}[name]
    assert target.max_positions == limit
    assert (target.notes != []) == (name == "phi3_longrope")
    tokens = text(length=limit)
    table = list(range(limit // BLOCK, 0, -1))
    theirs = golden(make_module(name), tokens)

    def run(start: int, part: list[int], pages: Pages) -> Tensor:
        builder = BatchBuilder(BLOCK)
        builder.request(table)
        builder.line(start, part, len(part))
        return target.forward(builder.build(target.device), pages).logits

    pages = target.make_pages(limit + BLOCK)
    short = run(0, tokens[:5], pages)
    long = run(5, tokens[5:], pages)
    again = run(0, tokens[:5], target.make_pages(limit + BLOCK))
    assert torch.equal(short, again), "a pass that reached the last position changed a later one"
    close(torch.cat((short, long)), theirs)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox", "opt", "mixtral"])
def test_first_layers_equal_a_model_cut_short(name):
    """`num_layers=n` gives what Transformers gives for the same weights with only n layers."""
    module, tokens = make_module(name), text(length=20)
    target = make_target(module)
    whole = run_line(target, target.make_pages(64), 0, tokens)
    config_before = module.config.to_dict()
    builder = BatchBuilder(BLOCK)
    builder.request(TABLE)
    builder.line(0, tokens, len(tokens))
    pages = target.make_pages(64)
    early = target.forward(builder.build(target.device), pages, num_layers=2).logits

    short = make_module(
        name, num_hidden_layers=2, **({"layer_types": module.config.layer_types[:2]} if name == "gemma2" else {})
    )
    state = module.state_dict()
    short.load_state_dict({key: state[key] for key in short.state_dict()})
    close(early, golden(short, tokens))
    assert all(not page.any() for page in (pages.keys[2], pages.values[2])), "a layer beyond the view was run"
    assert module.config.to_dict() == config_before
    assert torch.equal(run_line(target, target.make_pages(64), 0, tokens), whole)


def test_too_many_layers_are_refused():
    target = make_target(make_module("llama"))
    builder = BatchBuilder(BLOCK)
    builder.request(TABLE)
    builder.line(0, [5], 1)
    with pytest.raises(ModelError, match="a view of 4 layers was asked of a model that has 3"):
        target.forward(builder.build(target.device), target.make_pages(64), num_layers=4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_taps_are_the_hidden_states(name):
    module, tokens = make_module(name), text(length=20)
    with torch.inference_mode():
        hidden = module(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    target = make_target(module)
    builder = BatchBuilder(BLOCK)
    builder.request(TABLE)
    builder.line(0, tokens, 1)
    output = target.forward(builder.build(target.device), target.make_pages(64), taps=(0, 1))
    assert set(output.taps) == {0, 1}
    for layer, states in output.taps.items():
        torch.testing.assert_close(states, hidden[layer + 1][0], atol=1e-4, rtol=1e-4)


def test_logits_only_where_asked():
    target = make_target(make_module("llama"))
    tokens = text(length=20)
    all_rows = run_line(target, target.make_pages(64), 0, tokens)
    assert torch.equal(run_line(target, target.make_pages(64), 0, tokens, num_logits=3), all_rows[-3:])
    none = run_line(target, target.make_pages(64), 0, tokens, num_logits=0)
    assert none.shape == (0, VOCAB)


def test_padding_of_the_embedding_is_cut_off():
    """An id beyond the tokenizer's can never be emitted: its logit is not there (faults.md 24)."""
    module = make_module("llama")
    target = make_target(module, make_tokenizer(120))
    tokens = [token % 120 for token in text()]
    logits = run_line(target, target.make_pages(64), 0, tokens)
    assert target.vocab_size == 120
    close(logits, golden(make_module("llama"), tokens)[:, :120])


def test_one_module_serves_many_requests():
    """Two requests of unequal length in one pass, each against its own golden."""
    module = make_module("gemma2")
    first, second = text(length=11), text(seed=3, length=23)
    theirs = golden(module, first), golden(module, second)
    target = make_target(module)
    builder = BatchBuilder(BLOCK)
    builder.request([1, 2, 3])
    builder.line(0, first, len(first))
    builder.request([10, 9, 8, 7, 6, 5])
    builder.line(0, second, len(second))
    logits = target.forward(builder.build(target.device), target.make_pages(64)).logits
    close(logits[:11], theirs[0])
    close(logits[11:], theirs[1])


def test_ends_come_from_the_generation_config_and_the_tokenizer():
    module = make_module("llama")
    module.generation_config.eos_token_id = [7, 9]
    assert make_target(module).eos_ids == {2, 7, 9}


def test_a_config_without_a_longest_context_is_refused():
    with pytest.raises(ModelError, match="names no longest context"):
        longest_context(SimpleNamespace(model_type="odd", max_position_embeddings=None))
