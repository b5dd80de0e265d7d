"""Widened twins say what their originals say, drafters included, and cost what their new shape costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError, ModelError
from outrider.kernels import select
from outrider.measure.divergence import divergence
from outrider.models import shapes, widen
from outrider.models.heads.files import describe_target
from outrider.models.heads.widen import widened
from outrider.models.lean_spec import spec_of
from outrider.models.loader import twin_of
from outrider.models.twin import twin_module, widening_of
from tests import artefacts
from tests.models.tiny import VOCAB, make_module, make_target, make_tokenizer

PROMPTS = [(5, 6, 7), (9, 8, 7, 6, 5), tuple(range(10, 40)), (3, 3, 3)]
PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=3),
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=4, top_p=0.9),
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.5, seed=5, repetition_penalty=1.2),
]


def twin(module: Any, kernels: str = "plain") -> Any:
    return twin_of("tiny", "2x", module, select(kernels, torch.device("cpu")), make_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("original")
    make_module("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def answers(folder: str, drafter: str, **settings: Any) -> tuple[list[Any], list[Any]]:
    """Ids of every reply, and what was drafted and accepted on the way."""
    named = {}
    if drafter in artefacts.KINDS:
        named["drafter_model"] = artefacts.folder(drafter, make_target(make_module("llama")))
    llm = LLM(folder, drafter=drafter, num_slots=512, self_test=False, threads=1, **settings, **named)
    with llm.always_guessing():
        results = llm.generate(PROMPTS, PARAMS)
    assert [result.error for result in results] == [None] * len(PROMPTS)
    tallies = [(result.tally.cycles, result.tally.drafted, result.tally.accepted) for result in results]
    return [result.token_ids for result in results], tallies


@pytest.fixture(scope="module")
def plain(folder) -> list[Any]:
    return answers(folder, "none")[0]


@pytest.mark.parametrize("drafter", ["none", "ngram", *artefacts.KINDS])
def test_twin_and_widened_drafter_say_what_the_originals_say(folder, plain, drafter):
    (ids, tallies), (twin_ids, twin_tallies) = answers(folder, drafter), answers(folder, drafter, widen="2x")
    assert twin_ids == ids == plain
    drafted, twin_drafted = (sum(tally[1] for tally in found) for found in (tallies, twin_tallies))
    accepted, twin_accepted = (sum(tally[2] for tally in found) for found in (tallies, twin_tallies))
    # Its guesses are rounded otherwise, which may turn a near tie of a drafter's own, and nothing else.
    assert abs(twin_accepted - accepted) <= 2
    assert abs(twin_drafted - drafted) <= 0.05 * drafted
    assert drafter == "none" or accepted > 0


def test_load_holds_a_twin_to_its_originals_own_logits(folder):
    llm = LLM(folder, drafter="none", num_slots=512, widen="2x", threads=1)
    target = llm.engine.target
    assert target.report is not None
    assert target.report.reference_error < 1e-5
    assert target.exactness == "seed"
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (64, 5, 2 * VOCAB)
    assert "widened to 2x" in llm.resolved.model
    assert any("twin" in note for note in llm.resolved.notes)


def test_the_law_of_a_twin_is_its_originals():
    module = make_module("llama")
    found = divergence(twin(module), make_target(module), [(5, 6, 7, 8, 9), tuple(range(20, 50))])
    assert found.positions == 35
    assert found.max_kl < 1e-8


def test_added_words_have_no_chance_and_added_weights_are_there():
    module = make_module("llama")
    made = twin(module)
    big = twin_module(module, widening_of(module, "2x"))
    with torch.inference_mode():
        logits = big(input_ids=torch.tensor([[5, 6, 7, VOCAB + 9]])).logits[0].float()
        small = module(input_ids=torch.tensor([[5, 6, 7, 9]])).logits[0].float()  # added words repeat the real ones
    assert torch.allclose(logits[:, :VOCAB], small, atol=1e-3)
    assert float(logits[:, VOCAB:].max()) < -1e3
    assert made.nbytes > 5 * sum(p.nbytes for p in module.parameters())
    dense = {name: p for name, p in big.named_parameters() if name.endswith(("q_proj.weight", "gate_proj.weight"))}
    assert all(float((p != 0).float().mean()) > 0.7 for p in dense.values())


def test_a_twin_is_the_same_every_time_and_on_every_kernel_set():
    module = make_module("llama")
    a, b = (twin_module(module, widening_of(module, "2x")).state_dict() for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert twin(module, "plain").nbytes == twin(module, "native").nbytes


def test_the_8b_plan_has_the_shapes_of_llama_8b_and_its_drafters():
    small = spec_of(
        LlamaConfig(
            hidden_size=576,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            vocab_size=49_152,
            tie_word_embeddings=True,
        )
    )
    made = widen.Widening(small, shapes.target_shape("8b", shapes.Shape.of(small)), torch.device("cpu"), torch.bfloat16)
    weights = sum(torch.Size(shape).numel() for shape in made.spec().shapes().values())
    assert weights == 8_030_261_248  # Llama 3.1 8B's own number
    assert made.stretch == 2
    assert made.eps > 0
    assert shapes.draft_words("8b", 16_384) == 32_000


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("qwen2", {}, "biases"),
        ("qwen3", {"head_dim": 8}, "norms of queries"),
        ("gpt2", {}, "Llama-like"),
    ],
)
def test_what_no_rule_covers_is_refused(architecture, settings, reason):
    module = make_module(architecture, **settings)
    with pytest.raises(ModelError, match=reason):
        widening_of(module, "2x")


def test_a_model_larger_than_the_plan_is_refused():
    with pytest.raises(ModelError, match="num_layers=40"):
        widening_of(make_module("llama", num_hidden_layers=40), "8b")


def test_unknown_plans_and_packed_twins_are_refused(folder):
    with pytest.raises(ConfigError, match="widen='9b'"):
        LLM(folder, widen="9b")
    with pytest.raises(ModelError, match="float weights"):
        LLM(folder, widen="2x", dtype="packed")


def test_a_drafter_of_another_target_is_not_widened():
    other = artefacts.make("eagle3", make_target(make_module("llama", num_hidden_layers=4)))
    with pytest.raises(ModelError, match="num_hidden_layers is 4 there and 3 here"):
        widened(other, twin(make_module("llama")))


def test_a_widened_drafter_is_bound_to_the_twin():
    target = twin(make_module("llama"))
    made = widened(artefacts.make("eagle3", make_target(make_module("llama"))), target)
    assert made.config["target"] == describe_target(target)
    kept = made.kept_ids()
    assert len(kept) == made.tensors["head.weight"].shape[0]
    assert int(kept[-1]) == target.vocab_size - 1
