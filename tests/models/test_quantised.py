"""Weights that torchao or compressed-tensors quantised: the library's own logits, and the same bits at any width."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from outrider import LLM, SamplingParams
from outrider.errors import ModelError
from outrider.models import quantised
from outrider.models.batch import BatchBuilder
from outrider.models.loader import load
from outrider.models.target import Target
from tests.models.tiny import VOCAB, make_module, make_tokenizer

for library in quantised.LIBRARIES.values():
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'outrider[quantised]'", allow_module_level=True)

SIZES = {"hidden_size": 64, "intermediate_size": 128}
WAYS = {"torchao-int8": "module", "pack-quantized-4": "lean", "pack-quantized-8": "lean", "int-quantized-8x8": "module"}
"""How each kind of weights is run."""


def torchao_int8(folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    make_module("llama", torch.bfloat16, **SIZES).save_pretrained(folder / "floats")
    how = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    made = AutoModelForCausalLM.from_pretrained(folder / "floats", dtype=torch.bfloat16, quantization_config=how)
    made.save_pretrained(folder)


def compressed(folder: Path, layout: str, bits: int, inputs: dict[str, Any] | None = None) -> None:
    """As a calibrated model is written: symmetric scales of the largest weight of a row, or of 32 in a row."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    module = make_module("llama", torch.bfloat16, **SIZES)
    size = 32 if bits == 4 else None
    weights = QuantizationArgs(num_bits=bits, strategy="group" if size else "channel", group_size=size)
    activations = QuantizationArgs(**inputs) if inputs else None
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    how = QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], format=layout, quantization_status="compressed"
    )
    apply_quantization_config(module, how)
    for part in module.modules():
        if hasattr(part, "weight_scale"):
            groups = part.weight.detach().float().unflatten(1, (-1, size or part.weight.shape[1]))
            largest = groups.abs().amax(dim=2) * 2 / (2**bits - 1)
            part.weight_scale.data.copy_(largest.view_as(part.weight_scale))
    compressor = ModelCompressor.from_pretrained_model(module)
    compressor.compress_model(module)
    module.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantised")
    found = {name: root / name for name in WAYS}
    torchao_int8(found["torchao-int8"])
    compressed(found["pack-quantized-4"], "pack-quantized", 4)
    compressed(found["pack-quantized-8"], "pack-quantized", 8)
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True}
    compressed(found["int-quantized-8x8"], "int-quantized", 8, inputs)
    for folder in found.values():
        make_tokenizer().save_pretrained(folder)
    return found


@pytest.fixture(scope="module", params=WAYS)
def served(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[str, Path, Target]:
    return request.param, folders[request.param], load(str(folders[request.param]), kernels="plain")


def logits(target: Target, tokens: list[int], width: int) -> torch.Tensor:
    """Of tokens that all stand at one place behind a common text, in passes of so many."""
    pages = target.make_pages(128)
    known = BatchBuilder(16)
    known.request([1])
    known.line(0, [5, 77, 3, 120, 64, 9], 1)
    target.forward(known.build(target.device), pages)
    rows = []
    for start in range(0, len(tokens), width):
        builder = BatchBuilder(16)
        builder.request([1])
        for place, token in enumerate(tokens[start : start + width], start):
            builder.node(token, 6, [32 + place])
        rows.append(target.forward(builder.build(target.device), pages).logits)
    return torch.cat(rows)


@torch.inference_mode()
def test_it_computes_what_the_library_computes(served: tuple[str, Path, Target]) -> None:
    name, folder, target = served
    tokens = torch.tensor([[5, 77, 3, 120, 64, 9, 33]])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(tokens).logits[0, -1]
    floats = make_module("llama", torch.bfloat16, **SIZES)(tokens).logits[0, -1]
    ours = logits(target, [33], 1)[0]
    assert target.way == WAYS[name]
    error = float((ours - theirs).norm() / theirs.std() / VOCAB**0.5)
    rounding = float((theirs - floats).norm() / floats.std() / VOCAB**0.5)
    assert (error < 0.05, error < rounding) == (True, True), (error, rounding)


def test_rows_have_the_same_bits_at_any_width(served: tuple[str, Path, Target]) -> None:
    """Fault 2."""
    _, _, target = served
    assert (target.exactness, target.report.rows_varied) == ("seed", 0)
    tokens = torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = logits(target, tokens, 64)
    for width in (1, 9, 16, 33):
        assert torch.equal(logits(target, tokens, width), whole), width


def test_guesses_change_no_text(served: tuple[str, Path, Target]) -> None:
    _, folder, _ = served
    prompts = [[3, 4, 5, 3, 4, 5, 3, 4], [9] * 6, list(range(20, 40))]
    params = [SamplingParams(temperature=t, max_tokens=12, seed=1) for t in (0.0, 0.0, 1.0)]
    common: dict[str, Any] = {"kernels": "plain", "self_test": False, "num_slots": 1024}
    plain = LLM(str(folder), drafter="none", **common).generate(prompts, params)
    llm = LLM(str(folder), drafter="early_exit", **common)
    with llm.engine.always_guessing(4, 2):
        found = llm.generate(prompts, params)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert sum(result.tally.drafted for result in found) > 12


def test_their_bytes_are_counted(served: tuple[str, Path, Target]) -> None:
    """A byte a weight of torchao's linears, and a few a row; what is made dense is counted as it is then."""
    name, _, target = served
    module = make_module("llama", torch.bfloat16, **SIZES)
    whole = sum(parameter.nbytes for parameter in module.parameters())
    if name == "torchao-int8":
        parts = [part for layer in module.model.layers for part in layer.modules() if hasattr(part, "in_features")]
        least = whole - sum(part.weight.numel() for part in parts)
        assert least < target.nbytes <= least + 8 * sum(part.out_features for part in parts)
        assert "weights quantised by torchao" in target.model.numerics
    else:
        assert whole <= target.nbytes < 1.6 * whole


def test_without_the_library_the_refusal_says_what_to_install(folders, monkeypatch) -> None:
    found = importlib.util.find_spec
    missing = set(quantised.LIBRARIES.values())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in missing else found(name))
    for name, library in (("torchao-int8", "torchao"), ("pack-quantized-4", "compressed-tensors")):
        with pytest.raises(ModelError, match=rf'{library} quantised, and that is not.*"outrider\[quantised\]"'):
            load(str(folders[name]), kernels="plain")


def test_they_are_not_rounded_again(folders) -> None:
    with pytest.raises(ModelError, match="torchao quantised already: leave dtype out"):
        load(str(folders["torchao-int8"]), kernels="plain", dtype="int8")
    with pytest.raises(ModelError, match="leave widen out"):
        load(str(folders["pack-quantized-4"]), kernels="plain", widen="2x")


def test_loading_says_nothing(folders, capfd) -> None:
    for folder in folders.values():
        load(str(folder), kernels="plain", self_test=False)
    assert capfd.readouterr() == ("", "")
