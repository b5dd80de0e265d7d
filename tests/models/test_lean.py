"""The lean layers against Transformers: plain, in chunks, as trees, cut short, tapped; and weights kept bit for bit."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig

from outrider.cache.pages import Pages
from outrider.errors import ModelError
from outrider.kernels import select
from outrider.models.batch import BatchBuilder
from outrider.models.lean import LeanModel
from tests.models.test_architectures import BLOCK, LENGTH, PARENTS, SPARE, TABLE, close, golden, path_to, text
from tests.models.tiny import make_module
from tests.models.tiny_gguf import write_model

CPU = torch.device("cpu")
LEAN = {
    "llama": {},
    "llama_bias": {},
    "llama3_rope": {},
    "mistral": {},
    "qwen2": {},
    "qwen2_sliding": {},
    "qwen3": {},
    "smollm3": {"num_hidden_layers": 4},  # the fourth layer has no rotation
    "llama_gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "llama_yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 24,
        }
    },
    "llama_odd": {"hidden_size": 36, "intermediate_size": 50, "head_dim": 10, "num_key_value_heads": 1},
}


def module_of(name: str, dtype: torch.dtype = torch.float32, **settings):
    base = name if name not in ("llama_gelu", "llama_yarn", "llama_odd") else "llama"
    return make_module(base, dtype, **{**LEAN[name], **settings})


@pytest.fixture(scope="module", params=["native", "plain"])
def kernels(request):
    chosen = select("auto" if request.param == "native" else "plain", CPU)
    return chosen if chosen.name == request.param else pytest.skip("no compiler is installed here")


def lean(module, kernels) -> LeanModel:
    model = LeanModel.from_module(module, kernels)
    assert model is not None
    return model


def run(model: LeanModel, pages: Pages, builder: BatchBuilder, **settings):
    batch = builder.build(CPU)
    return model.forward(batch.tokens, batch.positions, batch.slots, batch.keys, pages, batch.logit_rows, **settings)


def line(start: int, tokens: list[int], num_logits: int | None = None) -> BatchBuilder:
    builder = BatchBuilder(BLOCK)
    builder.request(TABLE)
    builder.line(start, tokens, len(tokens) if num_logits is None else num_logits)
    return builder


def make_pages(model: LeanModel, dtype: torch.dtype = torch.float32) -> Pages:
    return Pages(model.page_specs, 64, dtype, CPU)


@pytest.mark.parametrize("name", LEAN)
def test_logits_equal_transformers(name, kernels):
    module = module_of(name)
    tokens, nodes = text(), text(seed=1, length=len(PARENTS))
    whole = golden(module, tokens)
    branches = [golden(module, tokens + [nodes[i] for i in path_to(node)])[-1] for node in range(len(nodes))]
    model = lean(module, kernels)
    close(run(model, make_pages(model), line(0, tokens))[0], whole)

    pages = make_pages(model)
    chunks = [run(model, pages, line(start, tokens[start : start + 7]))[0] for start in range(0, LENGTH, 7)]
    close(torch.cat(chunks), whole)
    builder = line(LENGTH - 1, tokens[-1:], 1)
    builder.tree(LENGTH, nodes, PARENTS, range(SPARE, SPARE + len(nodes)))
    close(run(model, pages, builder)[0], torch.stack([whole[-1], *branches]))


@pytest.mark.parametrize("pages", [torch.float32, torch.bfloat16], ids=["float32 pages", "bfloat16 pages"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_and_its_keys_have_the_same_bits_in_any_company(kernels, dtype, pages):
    """Whole, in chunks, token by token, and as a node of a tree: equal logits, and equal keys and values."""
    model = lean(module_of("qwen3", dtype), kernels)
    tokens = text()
    once = make_pages(model, pages)
    whole = run(model, once, line(0, tokens))[0]
    for size in (1, 5):
        again = make_pages(model, pages)
        parts = [run(model, again, line(at, tokens[at : at + size]))[0] for at in range(0, LENGTH, size)]
        assert torch.equal(torch.cat(parts), whole)
        for ours, theirs in zip((*again.keys, *again.values), (*once.keys, *once.values), strict=True):
            assert torch.equal(ours, theirs)
    builder = line(LENGTH - 4, tokens[-4:-3], 1)
    # The text's last three tokens as a path of a tree, beside strangers.
    builder.tree(LENGTH - 3, [9, tokens[-3], tokens[-2], 8, tokens[-1]], [-1, -1, 1, 1, 2], range(SPARE, SPARE + 5))
    logits = run(model, once, builder)[0]
    assert torch.equal(logits[[0, 2, 3, 5]], whole[-4:])


def test_early_exit_and_taps(kernels):
    module = module_of("llama")
    tokens, model = text(), lean(module, kernels)
    with torch.inference_mode():
        states = module(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
        exit_logits = module.lm_head(module.model.norm(states[2]))[0]
    logits, taps = run(model, make_pages(model), line(0, tokens, 1), num_layers=2, taps=(0, 1))
    close(logits, exit_logits[-1:])
    assert list(taps) == [0, 1]
    close(taps[0], states[1][0])
    close(taps[1], states[2][0])
    short = Pages(model.page_specs[:2], 64, torch.float32, CPU)
    assert torch.equal(run(model, short, line(0, tokens, 1), num_layers=2)[0], logits)


def test_no_logits_and_chosen_rows(kernels):
    model = lean(module_of("llama"), kernels)
    whole = run(model, make_pages(model), line(0, text()))[0]
    assert torch.equal(run(model, make_pages(model), line(0, text(), 3))[0], whole[-3:])
    assert run(model, make_pages(model), line(0, text(), 0))[0].shape == (0, whole.shape[1])


def test_recordings_survive_wider_passes_and_other_pages(kernels):
    """Buffers grow with the widest pass, and every stack of pages has its own recording."""
    model = lean(module_of("llama"), kernels)
    one, other = make_pages(model), make_pages(model)
    narrow = run(model, one, line(0, text()[:3]))[0]
    run(model, other, line(0, text()))
    assert torch.equal(run(model, one, line(0, text()[:3]))[0], narrow)
    assert not torch.equal(one.keys[0], other.keys[0])


@pytest.mark.parametrize("name", ["gemma", "olmo2", "phi3", "granite", "cohere", "mixtral", "llama_dynamic"])
def test_what_the_layers_do_not_describe_is_left_to_the_module(name):
    assert LeanModel.from_module(make_module(name), select("plain", CPU)) is None


def test_a_module_with_anything_unknown_in_it_is_left_alone():
    kernels = select("plain", CPU)

    class OtherLinear(torch.nn.Linear):
        pass

    module = make_module("llama")
    module.model.layers[1].mlp.up_proj.__class__ = OtherLinear
    assert LeanModel.from_module(module, kernels) is None
    module = make_module("llama")
    module.model.layers[1].self_attn.extra = torch.nn.Parameter(torch.zeros(3))
    assert LeanModel.from_module(module, kernels) is None
    assert LeanModel.from_module(make_module("llama", torch.float16), kernels) is None
    half = make_module("llama")
    half.model.norm.bfloat16()
    assert LeanModel.from_module(half, kernels) is None
    assert LeanModel.from_module(make_module("llama", hidden_act="relu"), kernels) is None


KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.BF16, Kind.F32]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_gguf_file_keeps_every_weight(tmp_path, kernels, kind):
    """Dequantised by our rows and by the `gguf` package's own arithmetic: equal to the bit."""
    path = tmp_path / "tiny.gguf"
    expected = write_model(path, kind)
    model = LeanModel.from_gguf(path, AutoConfig.from_pretrained(tmp_path, gguf_file=path.name), kernels)
    assert model is not None

    def rows(parts):
        return torch.cat([part.lookup(torch.arange(part.out_features)) for part in parts])

    for i, layer in enumerate(model._layers):
        for parts, names in (
            (layer.qkv, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            (layer.o, ["self_attn.o_proj"]),
            (layer.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.down, ["mlp.down_proj"]),
        ):
            assert torch.equal(rows(parts), torch.cat([expected[f"model.layers.{i}.{n}.weight"] for n in names]))
        assert torch.equal(layer.input_norm, expected[f"model.layers.{i}.input_layernorm.weight"])
    assert torch.equal(rows([model._embedding]), expected["model.embed_tokens.weight"])
    # And the pass over them: within what rounding activations to eight bits may do to a tiny random model.
    module = make_module(
        "llama",
        vocab_size=model.spec.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        tie_word_embeddings=True,
    )
    module.load_state_dict(expected, strict=False)
    whole = golden(module, text())
    logits = run(model, make_pages(model), line(0, text()))[0]
    assert float((logits - whole).std() / whole.std()) < 0.02


def test_a_file_that_mixes_types_runs_in_parts(tmp_path, kernels):
    """llama.cpp keeps some tensors at more bits than others: neighbours of two types are not fused."""
    path = tmp_path / "tiny.gguf"
    write_model(path, Kind.Q4_1)
    reader = gguf.GGUFReader(path)
    v = next(t for t in reader.tensors if t.name == "blk.0.attn_v.weight")
    mixed = tmp_path / "mixed.gguf"
    writer = gguf.GGUFWriter(mixed, "llama")
    for tensor in reader.tensors:
        if tensor.name == v.name:
            exact = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, exact, raw_dtype=Kind.F32)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    one, other = (LeanModel.from_gguf(file, config, kernels) for file in (path, mixed))
    assert one is not None
    assert other is not None
    assert [part.kind for part in other._layers[0].qkv] == ["q4", "float32"]
    ours, theirs = (run(model, make_pages(model), line(0, text()))[0] for model in (one, other))
    assert not torch.equal(ours, theirs)
    assert float((ours - theirs).std() / theirs.std()) < 0.02


def test_a_gguf_file_of_something_else_is_none_and_a_damaged_one_is_refused(tmp_path):
    kernels = select("plain", CPU)
    path = tmp_path / "tiny.gguf"
    write_model(path)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    assert LeanModel.from_gguf(path, make_module("gemma").config, kernels) is None
    config.num_hidden_layers = 1
    assert LeanModel.from_gguf(path, config, kernels) is None
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelError, match="cut short"):
        LeanModel.from_gguf(path, config, kernels)
