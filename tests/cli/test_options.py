"""Options follow from the dataclasses: each field has one, with its help, and each value arrives."""

from __future__ import annotations

import io
from dataclasses import fields

import pytest
import typer

from outrider.cli.app import app
from outrider.cli.options import NOT_OPTIONS, described, read_prompt
from outrider.config import EngineConfig
from outrider.errors import RequestError
from outrider.registry import DRAFTERS
from outrider.request import LogprobsMode, SamplingParams

GIVEN = {
    "--temperature 0.7": ("temperature", 0.7),
    "--top-k 5": ("top_k", 5),
    "--top-p 0.9": ("top_p", 0.9),
    "--min-p 0.05": ("min_p", 0.05),
    "--repetition-penalty 1.1": ("repetition_penalty", 1.1),
    "--frequency-penalty -0.5": ("frequency_penalty", -0.5),
    "--presence-penalty 0.5": ("presence_penalty", 0.5),
    "--logit-bias 3=-100 --logit-bias 4=1.5": ("logit_bias", {3: -100.0, 4: 1.5}),
    "--bad-word foo --bad-word bar": ("bad_words", ("foo", "bar")),
    "--min-tokens 2": ("min_tokens", 2),
    "--max-tokens 9": ("max_tokens", 9),
    "--stop END --stop ###": ("stop", ("END", "###")),
    "--stop-token-id 5 --stop-token-id 6": ("stop_token_ids", (5, 6)),
    "--ignore-eos": ("ignore_eos", True),
    "--seed 18446744073709551615": ("seed", 2**64 - 1),
    "--n 3": ("n", 3),
    "--logprobs 2": ("logprobs", 2),
    "--logprobs-mode warped": ("logprobs_mode", LogprobsMode.WARPED),
    "--prompt-logprobs 0": ("prompt_logprobs", 0),
    "--no-speculation": ("speculation", False),
}
ENGINE = {
    "--drafter ngram": ("drafter", "ngram"),
    "--drafter-model tiny": ("drafter_model", "tiny"),
    "--dtype float32": ("dtype", "float32"),
    "--device cpu": ("device", "cpu"),
    "--threads 1": ("threads", 1),
    "--depth 0": ("depth", 0),
    "--width 2": ("width", 2),
    "--nodes 9": ("nodes", 9),
    "--share-history": ("share_history", True),
    "--exit-layers 3": ("exit_layers", 3),
    "--no-adaptive": ("adaptive", False),
    "--acceptance rejection": ("acceptance", "rejection"),
    "--max-context 64": ("max_context", 64),
    "--max-requests 2": ("max_requests", 2),
    "--max-rows 32": ("max_rows", 32),
    "--num-slots 128": ("num_slots", 128),
    "--block-size 8": ("block_size", 8),
    "--no-prefix-cache": ("prefix_cache", False),
    "--kernels plain": ("kernels", "plain"),
    "--no-self-test": ("self_test", False),
}


@pytest.mark.parametrize("words", GIVEN)
def test_sampling_values_arrive(run, engines, words):
    name, value = GIVEN[words]
    assert run("generate", "m", "p", *words.split(), "--json").code == 0
    (prompt, params, raw) = engines[0].asked[0]
    assert (prompt, raw) == ("p", False)
    assert params == SamplingParams.of(**{name: value})


@pytest.mark.parametrize("words", ENGINE)
def test_engine_values_arrive(run, engines, words):
    name, value = ENGINE[words]
    assert run("generate", "m", "p", *words.split(), "--json").code == 0
    assert engines[0].settings == {name: value}


@pytest.mark.parametrize(("source", "given"), [(SamplingParams, GIVEN), (EngineConfig, ENGINE)])
def test_no_field_is_left_out(source, given):
    """A new field of a dataclass fails here until it has an option and a line above, or is named as no option."""
    expected = {f.name for f in fields(source)} - NOT_OPTIONS[source]
    assert {name for name, _ in given.values()} == expected
    assert expected <= described(source).keys()


def test_nothing_given_leaves_every_default(run, engines):
    assert run("generate", "m", "p", "--json").code == 0
    assert engines[0].settings == {}
    assert engines[0].asked[0][1] == SamplingParams()


def test_drafters_in_the_help_are_the_registry():
    verb = typer.main.get_command(app).commands["generate"]
    (option,) = [p for p in verb.params if p.name == "drafter"]
    assert f"One of auto, none, {', '.join(DRAFTERS)}." in option.help


def test_descriptions_are_cut_at_the_next_field():
    text = described(SamplingParams)
    assert text["temperature"] == "0 is greedy."
    assert text["frequency_penalty"] == text["presence_penalty"] == "over the completion, as OpenAI defines them."


def test_prompt_from_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("wie heißt du?\n".encode())))
    assert read_prompt("-") == "wie heißt du?\n"


@pytest.mark.parametrize(("data", "part"), [(b"\xff\xfe", "not UTF-8"), (b"", "empty")])
def test_unreadable_standard_input_is_refused(monkeypatch, data, part):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    with pytest.raises(RequestError, match=part):
        read_prompt("-")
