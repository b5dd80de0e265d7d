"""An exported drafter guesses by others' code what it guesses here; what their layouts have no room for is refused."""

from __future__ import annotations

import json
import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.errors import ModelError
from outrider.export.folder import export
from outrider.models.heads import files
from outrider.models.loader import load
from outrider.registry import TRAINED
from tests import artefacts
from tests import foreign_heads as theirs
from tests import reference_heads as golden
from tests.drafters import test_heads as served
from tests.models.test_foreign_heads import World, changed, weights
from tests.models.tiny import make_module, make_tokenizer

WORDS, PADDED = 16, 20
"""Ids that mean something, and rows of the tables."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target on disk, whose tables are padded."""
    folder = tmp_path_factory.mktemp("tiny")
    make_module("llama", vocab_size=PADDED, hidden_size=32, num_hidden_layers=4).save_pretrained(folder)
    make_tokenizer(WORDS).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def world(tiny):
    module = AutoModelForCausalLM.from_pretrained(tiny)
    embedding, head = module.get_input_embeddings().weight.detach(), module.lm_head.weight.detach()
    with torch.no_grad():
        cos, sin = module.model.rotary_emb(embedding, torch.arange(96)[None])
    half, config = cos.shape[-1] // 2, module.config
    ours = golden.World(embedding, head, cos[0, :, :half], sin[0, :, :half], config.head_dim, config.rms_norm_eps)
    return module, ours


def trained(drafter: str, tiny: str, folder: Path) -> str:
    """A drafter of ours with random weights, for the target on disk."""
    return str(artefacts.write(folder, drafter, load(tiny, kernels="plain", self_test=False)))


def states(module, tokens: list[int]) -> list[torch.Tensor]:
    """Output of every layer, (T, H) each."""
    seen: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda *a: seen.append(a[2])) for layer in module.model.layers]
    with torch.no_grad():
        module(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return [(state[0] if isinstance(state, tuple) else state)[0] for state in seen]


def paths(count: int) -> list[tuple[list[int], list[int]]]:
    """Known tokens and guesses beyond them."""
    rng = random.Random(2)
    words = [[rng.randrange(WORDS) for _ in range(rng.randint(2, 12))] for _ in range(count)]
    return [(known, [rng.randrange(WORDS) for _ in range(index % 4)]) for index, known in enumerate(words)]


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm"])
def test_an_exported_eagle3_says_what_it_says_here(engine, tiny, world, tmp_path):
    module, ours = world
    artefact = files.read(Path(trained("eagle3", tiny, tmp_path / "ours")))
    told = export(str(tmp_path / "ours"), tiny, tmp_path / "there", engine, 4, "org/tiny")
    config, tensors = theirs.read(tmp_path / "there")
    assert tensors["t2d"].shape == (PADDED,)
    if engine == "vllm":
        assert json.loads(shlex.split(told.how)[-1]) == told.settings
        assert told.settings == {"method": "eagle3", "model": str(tmp_path / "there"), "num_speculative_tokens": 4}
        assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
    else:
        assert told.settings["speculative_config"]["eagle3_layers_to_capture"] == artefact.config["taps"]
    kept = artefact.kept_ids()
    for known, path in paths(16):
        layers = states(module, known)
        here = golden.eagle3(artefact, ours, known, [layers[tap] for tap in artefact.config["taps"]], path)
        there = theirs.eagle3(config, tensors, ours.embedding, known, layers, path)
        torch.testing.assert_close(there[kept], here, atol=1e-6, rtol=1e-6)
        assert int(there.argmax()) == int(kept[here.argmax()])


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_an_exported_small_model_is_a_llama_of_every_id(engine, tiny, tmp_path):
    artefact = files.read(Path(trained("small_model", tiny, tmp_path / "ours")))
    told = export(str(tmp_path / "ours"), tiny, tmp_path / "there", engine, None, None)
    assert str(tmp_path / "there") in told.how
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "there", dtype=torch.float32)
    assert llama.config.vocab_size == PADDED
    oracle = served.Oracle.__new__(served.Oracle)
    oracle.artefact = artefact
    kept = artefact.kept_ids()
    assert len(kept) < WORDS
    for known, path in paths(24):
        here = oracle._small(known + path)
        with torch.no_grad():
            there = llama(torch.tensor([known + path])).logits[0, -1].double()
        torch.testing.assert_close(there[kept], here, atol=1e-4, rtol=1e-4)
        assert int(there.argmax()) == int(kept[here.argmax()])


def test_an_exported_medusa_of_the_plain_form_says_what_it_says_here(tiny, world, tmp_path):
    module, ours = world
    kept = torch.tensor([token for token in range(WORDS) if token % 4])
    made = TRAINED["medusa"].initialise(module, kept, num_heads=3, plain=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    target = files.describe_target(load(tiny, kernels="plain", self_test=False))
    files.write(tmp_path / "ours", {"drafter": "medusa", "target": target, **made.settings()}, made.tensors(), {}, "")
    artefact = files.read(tmp_path / "ours")
    export(str(tmp_path / "ours"), tiny, tmp_path / "there", "vllm", None, None)
    config, tensors = theirs.read(tmp_path / "there")
    rows = ours.head.bfloat16().float()  # as they are written
    for known, path in paths(12):
        known = [max(1, token) for token in known]  # 0 pads, and its row is zero
        layers, level = states(module, known), len(path) % 3
        here = golden.medusa(artefact, replace(ours, head=rows), known, [layers[-1]], path[:level])
        with torch.no_grad():
            last = module.model.norm(layers[-1][len(known) - 2])
        there = theirs.medusa(config, tensors, ours.head, last, level)
        torch.testing.assert_close(there[kept], here, atol=1e-2, rtol=1e-2)  # the last norm is kept in bfloat16
        assert int(there.argmax()) in kept


@pytest.mark.parametrize(
    ("drafter", "engine", "sentence"),
    [
        ("medusa", "vllm", "heads read three layers and the last token, .*; train heads of the plain form"),
        ("block", "vllm", "its block looks back only, .*; train one of the plain form"),
        ("block", "sglang", "its block looks back only"),
        ("eagle3", "sglang", "neither norms what it reads of the target nor what it feeds back; serve it with vLLM"),
        ("early_exit", "vllm", "no other engine drafts as early_exit does: export one of"),
        ("eagle3", "lmdeploy", "unknown engine 'lmdeploy': choose one of sglang, tensorrt-llm, vllm"),
    ],
)
def test_what_they_have_no_room_for_is_refused(drafter, engine, sentence, tiny, tmp_path):
    folder = trained(drafter, tiny, tmp_path / "ours")
    with pytest.raises(ModelError, match=sentence):
        export(folder, tiny, tmp_path / "there", engine, None, None)
    assert not (tmp_path / "there").exists()


def test_what_is_there_stays_and_another_targets_drafter_is_refused(tiny, tmp_path):
    folder = trained("eagle3", tiny, tmp_path / "ours")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(ModelError, match="is not empty: name another folder"):
        export(folder, tiny, tmp_path / "full", "vllm", None, None)
    make_module("llama", vocab_size=PADDED, hidden_size=32, num_hidden_layers=5).save_pretrained(tmp_path / "deep")
    make_tokenizer(WORDS).save_pretrained(tmp_path / "deep")
    with pytest.raises(ModelError, match="num_hidden_layers is 4 there and 5 here"):
        export(folder, str(tmp_path / "deep"), tmp_path / "there", "vllm", None, None)


ROUNDS = [
    ("eagle3 of its authors", "sglang"),
    ("eagle3 of its authors", "vllm"),
    ("eagle3 of its authors", "tensorrt-llm"),
    ("eagle3 of speculators", "vllm"),
    ("eagle3 with rows of its own", "vllm"),
    ("dflash of its authors", "sglang"),
    ("dflash of its authors", "vllm"),
    ("dflash of speculators", "vllm"),
    ("medusa of its authors", "vllm"),
    ("medusa of vllm", "vllm"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target of `World` on disk."""
    folder = tmp_path_factory.mktemp("whole")
    served.module().save_pretrained(folder)
    make_tokenizer(served.VOCAB).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("layout", "engine"), ROUNDS)
def test_a_head_of_others_comes_back_as_it_was(layout, engine, whole, tmp_path):
    """Read, written in their own or another layout, and run by their code: the same guesses, from the same bits."""
    drafter, world = theirs.LAYOUTS[layout][0], World()
    folder = Path(theirs.make(layout, served.module().config, tmp_path / "head"))
    if layout == "eagle3 of its authors":  # whose own choice needs a deeper target
        changed(str(folder), eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    export(str(folder), whole, tmp_path / "back", engine, None, None)
    _, before = weights(folder)
    _, after = weights(tmp_path / "back")
    if "token_map" in before:  # vLLM 0.32 cannot load one
        before["lm_heads.0.weight"] = after["lm_heads.0.weight"]
        assert torch.equal(after["lm_heads.0.weight"][before.pop("token_map")], weights(folder)[1]["lm_heads.0.weight"])
    kept = [tensor for tensor in before.values() if tensor.is_floating_point() and tensor.dim() == 2]
    assert all(any(t.shape == k.shape and torch.equal(t, k) for t in after.values()) for k in kept)
    for known, path in paths(6):
        path = path[:2]
        there, back = (world.law(drafter, place, known, path, range(0)) for place in (folder, tmp_path / "back"))
        known_ids = there > -torch.inf
        torch.testing.assert_close(back[known_ids], there[known_ids], atol=1e-9, rtol=1e-9)
        assert back.argmax() == there.argmax()
