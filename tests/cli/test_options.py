"""Options follow from the dataclasses: each field has one, with its help, and each value arrives."""

from __future__ import annotations

import io
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from outrider.cli.app import app
from outrider.cli.options import NOT_OPTIONS, described, read_prompt
from outrider.config import EngineConfig
from outrider.errors import RequestError
from outrider.registry import DRAFTERS
from outrider.request import LogprobsMode, SamplingParams
from outrider.training.reply_settings import ReplySettings
from outrider.training.settings import TrainConfig

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
    "--objective latency": ("objective", "latency"),
    "--objective goodput --pace 20.5": ("pace", 20.5),
    "--acceptance rejection": ("acceptance", "rejection"),
    "--max-context 64": ("max_context", 64),
    "--max-requests 2": ("max_requests", 2),
    "--max-rows 32": ("max_rows", 32),
    "--num-slots 128": ("num_slots", 128),
    "--memory-share 0.5": ("memory_share", 0.5),
    "--block-size 8": ("block_size", 8),
    "--no-prefix-cache": ("prefix_cache", False),
    "--kernels plain": ("kernels", "plain"),
    "--pass-width 8": ("pass_width", 8),
    "--in-flight 3": ("in_flight", 3),
    "--no-self-test": ("self_test", False),
    "--tensor-parallel 2": ("tensor_parallel", 2),
    "--widen 8b": ("widen", "8b"),
}
WITH = {"pace": {"objective": "goodput"}}
"""What a field is given with."""
TRAINING = {
    "--steps 7": ("steps", 7),
    "--seconds 1.5": ("seconds", 1.5),
    "--batch-tokens 512": ("batch_tokens", 512),
    "--accumulate 2": ("accumulate", 2),
    "--learning-rate 0.01": ("learning_rate", 0.01),
    "--warmup 0.1": ("warmup", 0.1),
    "--final-rate 0.2": ("final_rate", 0.2),
    "--weight-decay 0.3": ("weight_decay", 0.3),
    "--clip 0.5": ("clip", 0.5),
    "--loss tv": ("loss", "tv"),
    "--optimizer adamw": ("optimizer", "adamw"),
    "--vocabulary 99": ("vocabulary", 99),
    "--max-length 64": ("max_length", 64),
    "--held-out 0.25": ("held_out", 0.25),
    "--evaluation-tokens 1000": ("evaluation_tokens", 1000),
    "--seed 3": ("seed", 3),
    "--chunk 128": ("chunk", 128),
    "--no-fuse": ("fuse", False),
    "--log-every 2": ("log_every", 2),
    "--evaluate-every 3": ("evaluate_every", 3),
    "--measure-every 4": ("measure_every", 4),
    "--checkpoint-every 5": ("checkpoint_every", 5),
    "--checkpoint-seconds 6.5": ("checkpoint_seconds", 6.5),
}
REPLIES = {
    "--num-tokens 99": ("num_tokens", 99),
    "--seconds 1.5": ("seconds", 1.5),
    "--max-tokens 9": ("max_tokens", 9),
    "--follow-up 0.5": ("follow_up", 0.5),
    "--seed 3": ("seed", 3),
    "--shard-tokens 64": ("shard_tokens", 64),
}
# What `train` takes beside its dataclass, and the argument of `_train` (by name) that it becomes.
BESIDE = {
    "--corpus a --corpus b": ("folders", [Path("a"), Path("b")]),
    "--corpus a --shape num_layers=3 --shape block_size=4": ("sizes", {"num_layers": 3, "block_size": 4}),
    "--corpus a --start-from d": ("start_from", "d"),
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
    assert engines[0].settings == {name: value, **WITH.get(name, {})}


@pytest.fixture
def trained(monkeypatch):
    """The runs that `train` begins, as keywords; none of them runs, and nothing is looked for."""
    runs = []
    monkeypatch.setattr("outrider.cli.train._refuse_early", lambda *asked: None)
    monkeypatch.setattr("outrider.cli.train._rehearse", lambda *asked: None)

    def note(job, folders, config, sizes, start_from):
        runs.append({"job": job, "folders": folders, "config": config, "sizes": sizes, "start_from": start_from})

    monkeypatch.setattr("outrider.cli.train._train", note)
    return runs


@pytest.mark.parametrize("words", TRAINING)
def test_training_values_arrive(run, trained, words):
    name, value = TRAINING[words]
    end = {} if name in ("steps", "seconds") else {"steps": 1}
    asked = [*words.split(), *(["--steps", "1"] if end else [])]
    assert run("train", "eagle3", "--target", "m", "--out", "o", "--corpus", "c", *asked).code == 0
    assert trained[0]["config"] == TrainConfig(**end, **{name: value})


@pytest.mark.parametrize("words", BESIDE)
def test_what_train_takes_beside_arrives(run, trained, words):
    name, value = BESIDE[words]
    assert run("train", "eagle3", "--target", "m", "--out", "o", *words.split()).code == 0
    assert trained[0][name] == value


def test_a_training_job_is_what_was_asked_for(run, trained, monkeypatch, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    made = []
    monkeypatch.setattr("outrider.cli.train._replies", lambda *asked: made.append(asked) or Path("made"))
    words = ("--prompts", str(tmp_path / "p.jsonl"), "--reply-tokens", "500", "--measure-on", "cpu")
    out = tmp_path / "o"
    assert run("train", "medusa", "--target", "m", "--out", str(out), *words).code == 0
    job, asked, settings = made[0]
    assert (job.drafter, job.target, job.out, job.work) == ("medusa", "m", out, tmp_path / "o.work")
    assert job.served.device == "cpu"
    assert [prompt.content for prompt in asked] == ["a"]
    assert settings == ReplySettings(num_tokens=500)
    assert trained[0]["folders"] == [Path("made")]
    assert trained[0]["config"].seconds > 0  # without an end there is a default one


@pytest.fixture
def replied(monkeypatch):
    """The arguments of every call that `replies` makes; nothing is generated."""
    calls = []
    found = {"conversations": 1, "reply_tokens": 2}
    monkeypatch.setattr("outrider.cli.replies.generate", lambda *given: calls.append(given) or found)
    monkeypatch.setattr("outrider.models.loader.max_positions", lambda model: 64)
    return calls


@pytest.mark.parametrize("words", REPLIES)
def test_reply_values_arrive(run, engines, replied, words):
    name, value = REPLIES[words]
    assert run("replies", "m", "--out", "o", *words.split(), "--json").code == 0
    assert replied[0][1:] == (None, "o", ReplySettings(**{name: value}), 0, 1)


def test_what_replies_takes_beside_arrives(run, engines, replied, tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f'{{"prompt": "{name}"}}\n')
    files = [word for name in "ab" for word in ("--prompts", str(tmp_path / name))]
    words = (*files, "--share", "0=0.25", "--share", "0.8=0.75", "--rank", "1", "--world", "3")
    assert run("replies", "m", "--out", "o", *words).code == 0
    (_, asked, out, settings, rank, world) = replied[0]
    assert [prompt.content for prompt in asked] == ["a", "b"]
    assert (out, rank, world) == ("o", 1, 3)
    assert settings == ReplySettings(temperatures=((0.0, 0.25), (0.8, 0.75)))


@pytest.mark.parametrize("words", [words for words in ENGINE if words != "--drafter ngram"])
def test_engine_values_arrive_where_replies_are_made(run, engines, replied, words):
    name, value = ENGINE[words]
    assert run("replies", "m", "--out", "o", *words.split()).code == 0
    assert engines[0].settings[name] == value
    assert engines[0].settings["drafter"] == "none"


@pytest.mark.parametrize(
    ("source", "given"),
    [(SamplingParams, GIVEN), (EngineConfig, ENGINE), (TrainConfig, TRAINING), (ReplySettings, REPLIES)],
)
def test_no_field_is_left_out(source, given):
    """A new field of a dataclass fails here until it has an option and a line above, or is named as no option."""
    expected = {f.name for f in fields(source)} - NOT_OPTIONS.get(source, set())
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
