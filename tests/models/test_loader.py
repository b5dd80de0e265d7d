"""What the loader serves, and every refusal: one sentence with its remedy."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, BertLMHeadModel
from transformers.utils import logging

from outrider.errors import KernelError, ModelError
from outrider.models.batch import BatchBuilder
from outrider.models.gguf import read_header
from outrider.models.loader import load, locate, resolve_device
from tests.models.tiny import BASE, make_module, make_tokenizer


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def save(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, tokenizer=None, **settings) -> Path:
    module = make_module(name, dtype, **settings)
    module.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


def change(folder: Path, **settings) -> None:
    """Rewrite some of a config, `None` takes a key away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def refusal(model: str | Path, **settings) -> str:
    with pytest.raises(ModelError) as caught:
        load(str(model), kernels="plain", **settings)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 420
    return sentence


@pytest.fixture
def folder(tmp_path) -> Path:
    return save(tmp_path / "model")


def test_a_folder_is_served(folder):
    target = load(str(folder), kernels="plain")
    assert (target.dtype, target.vocab_size, target.eos_ids) == ("float32", 128, {2})
    assert target.report.exactness == "seed"
    assert target.report.rows_varied == 0
    assert target.report.reference_error < 1e-4


def test_dtype_auto_is_what_the_folder_holds(tmp_path):
    folder = save(tmp_path / "model", dtype=torch.bfloat16)
    assert load(str(folder), kernels="plain", self_test=False).dtype == "bfloat16"
    assert load(str(folder), kernels="plain", dtype="float32", self_test=False).dtype == "float32"


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_the_loaded_target_computes_what_transformers_computes(tmp_path, name):
    """Through the folder, on whichever way the loader takes (llama: lean), against the module's own forward."""
    folder = save(tmp_path / "model", name)
    tokens = [5, 77, 3, 120, 64, 9]
    with torch.inference_mode():
        theirs = make_module(name)(torch.tensor([tokens])).logits[0]
    target = load(str(folder), kernels="plain")
    assert target.way == ("lean" if name == "llama" else "module")
    builder = BatchBuilder(4)
    builder.request([1, 2])
    builder.line(0, tokens, len(tokens))
    ours = target.forward(builder.build(target.device), target.make_pages(16)).logits
    torch.testing.assert_close(ours, theirs, atol=2e-4 * float(theirs.std()), rtol=2e-4)


def test_an_alias_that_was_not_fetched():
    assert refusal("smollm2-135m-instruct").endswith("run `outrider fetch smollm2-135m-instruct`")


@pytest.mark.parametrize("name", ["", " ", "./nowhere", "/nowhere/at/all", "nothing.gguf", "smollm3", "a/b/c"])
def test_a_model_that_is_not_there(name):
    assert "there is no model" in refusal(name)


@pytest.mark.parametrize("name", ["nobody/nothing", "a b/c"])
def test_a_hub_id_that_cannot_be_reached(name):
    assert "the hub did not give it" in refusal(name)


def test_unknown_dtype(folder):
    assert "choose one of auto, float32" in refusal(folder, dtype="float8")


def test_packed_without_packed_weights(folder):
    assert "it holds no Q4_0, Q4_1 or Q8_0 weights" in refusal(folder, dtype="packed")


def test_weights_of_8_bits_are_another_law_close_by(tmp_path):
    """Rows mind no neighbour there either, keys and values are bfloat16, and only lean layers have them."""
    target = load(str(save(tmp_path / "model")), kernels="plain", dtype="int8")
    assert (target.dtype, target.way, target.page_dtype) == ("int8", "lean", torch.bfloat16)
    assert (target.report.exactness, target.report.rows_varied) == ("seed", 0)
    assert "8-bit weights against bfloat16 activations" in target.model.numerics
    builder = BatchBuilder(4)
    builder.request([1, 2])
    builder.line(0, [5, 77, 3, 120], 4)
    ours = target.forward(builder.build(target.device), target.make_pages(16)).logits
    with torch.inference_mode():
        theirs = make_module("llama")(torch.tensor([[5, 77, 3, 120]])).logits[0]
    error = float((ours - theirs).abs().max() / theirs.std())
    assert 1e-4 < error < 0.2
    assert "has no layers of int8 weights" in refusal(save(tmp_path / "other", "gemma2"), dtype="int8")


def test_weights_of_8_bits_on_the_native_kernels(folder):
    with pytest.raises(KernelError, match="choose dtype packed or bfloat16"):
        load(str(folder), kernels="native", dtype="int8")


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "mps", "banana"])
def test_unknown_device(device):
    with pytest.raises(ModelError, match=r"is unknown|is not here"):
        resolve_device(device)


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_broken_config(folder):
    (folder / "config.json").write_text('{"model_type": "llama", ')
    assert "config that Transformers cannot read" in refusal(folder)


def test_unknown_architecture(folder):
    change(folder, model_type="novel9")
    assert "config that Transformers cannot read" in refusal(folder)


@contextlib.contextmanager
def ordinary_user(folder: Path):
    """Root reads everything: let go of it for a while, with the way to `folder` open to all."""
    if os.geteuid() != 0:
        yield
        return
    for parent in folder.parents:
        if "pytest" in str(parent):
            parent.chmod(0o755)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_unreadable_folder(folder):
    folder.chmod(0)
    with ordinary_user(folder):
        assert "cannot be read: check its permissions" in refusal(folder)
    folder.chmod(0o755)


def test_unreadable_weights(folder):
    (folder / "model.safetensors").chmod(0)
    with ordinary_user(folder):
        assert "cannot be read" in refusal(folder)


def test_code_that_comes_with_a_model_is_never_run(folder):
    change(folder, model_type="novel9", auto_map={"AutoConfig": "novel.Config", "AutoModelForCausalLM": "novel.Model"})
    (folder / "novel.py").write_text("raise SystemExit('the model's code was run')")
    assert "config that Transformers cannot read" in refusal(folder)


def test_no_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in refusal(folder)


def test_broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer that Transformers cannot read" in refusal(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refusal(folder)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_weights_cut_short(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "cut short" in refusal(folder)


def test_weights_that_are_something_else(folder):
    (folder / "model.safetensors").write_bytes(b"<html>404: not found</html>" * 20)
    assert "is no safetensors file" in refusal(folder)


def test_a_missing_shard(folder):
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors is missing" in refusal(folder)


def test_a_broken_index(folder):
    (folder / "model.safetensors.index.json").write_text("{")
    assert "is no index of weights" in refusal(folder)


def test_missing_weights_are_never_made_up(folder):
    """A config that asks for more layers than the file holds would be filled with random numbers."""
    change(folder, num_hidden_layers=4)
    assert "lacks weights that its config asks for" in refusal(folder)


def test_surplus_layers(folder):
    change(folder, num_hidden_layers=2)
    assert "holds layers that its config does not know" in refusal(folder)


def test_weights_of_other_shapes(folder):
    change(folder, intermediate_size=48)
    assert "weights" in refusal(folder)


def test_the_config_of_another_architecture(folder):
    change(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    assert "weights" in refusal(folder)


def test_an_encoder_decoder(tmp_path):
    config = AutoConfig.for_model("t5", vocab_size=128, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert "is an encoder-decoder" in refusal(tmp_path)


def test_an_encoder(tmp_path):
    config = AutoConfig.for_model("bert", **{**BASE, "num_key_value_heads": None})
    BertLMHeadModel(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert "looks ahead of each token" in refusal(tmp_path)
    change(tmp_path, architectures=["BertForMaskedLM"])
    assert "holds a BertForMaskedLM, not a causal language model" in refusal(tmp_path)


def test_a_classifier(tmp_path):
    config = AutoConfig.for_model("llama", **BASE)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert "holds a LlamaForSequenceClassification" in refusal(tmp_path)


def test_recurrent_state(tmp_path):
    assert "cannot be served" in refusal(save(tmp_path, "mamba"))


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0) -> Path:
    """A header and two tensors: not a whole model, but a whole file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "tiny")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 3])
    weights = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    packed = gguf.quantize(weights, kind)
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "BF16"])
def test_a_gguf_header_agrees_with_the_reference_reader(tmp_path, kind):
    """Golden: the `gguf` package's own reader."""
    path = write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    header = read_header(path)
    assert header.architecture == "llama"
    assert header.metadata["general.name"] == "tiny"
    assert header.is_packable == (kind in ("Q4_0", "Q4_1", "Q8_0"))
    reader = gguf.GGUFReader(path)
    assert len(header.tensors) == len(reader.tensors) == 2
    for ours, theirs in zip(header.tensors, reader.tensors, strict=True):
        assert (ours.name, ours.kind, ours.start, ours.nbytes) == (
            theirs.name,
            theirs.tensor_type,
            theirs.data_offset,
            theirs.n_bytes,
        )
        assert list(ours.shape) == [int(n) for n in reversed(theirs.shape)]


def test_a_gguf_cut_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    header = read_header(tmp_path / "tiny.gguf")
    end = max(t.start + t.nbytes for t in header.tensors)
    cut = tmp_path / "cut.gguf"
    for length in [*range(4, 400, 7), end - 1]:
        cut.write_bytes(whole[:length])
        assert "cut short" in refusal(cut), length


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + b"0" * 100, b"<!doctype html>" * 10])
def test_a_file_that_is_no_gguf(tmp_path, content):
    path = tmp_path / "weights.gguf"
    path.write_bytes(content)
    assert "is not a GGUF file" in refusal(path)


def test_a_gguf_of_another_version(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    data[4] = 1
    path.write_bytes(data)
    assert "is GGUF version 1" in refusal(path)


def test_a_damaged_gguf_is_refused_whatever_the_damage(tmp_path):
    """Every byte of the header set to 255 in turn: one sentence, or a file that still reads."""
    path = write_gguf(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    sentences = []
    for place in range(0, 420, 3):
        path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        try:
            read_header(path)
        except ModelError as error:
            sentences.append(str(error))
    assert len(sentences) > 40
    assert not any("\n" in sentence for sentence in sentences)


def test_a_folder_finds_its_packed_file(folder):
    assert locate(str(folder)).gguf is None
    write_gguf(folder / "weights.gguf")
    assert locate(str(folder)).gguf == folder / "weights.gguf"


def test_loading_is_told_step_by_step(folder):
    """Of the weights that are read, then of the layers that are filled; Transformers' own bars are as they were."""
    told = []
    load(str(folder), kernels="plain", self_test=False, progress=lambda *step: told.append(step))
    stages = {stage: [(done, total) for name, done, total in told if name == stage] for stage, *_ in told}
    assert list(stages) == ["weights", "layers"]
    for steps in stages.values():
        assert [done for done, _ in steps] == list(range(1, steps[-1][1] + 1))
    assert stages["layers"][-1] == (3, 3)
    assert len(stages["weights"]) > 20
    assert logging.set_tqdm_hook(None) is None
