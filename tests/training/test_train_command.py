"""`outrider replies` and `outrider train`, end to end on a CPU: a tiny target, and a drafter that is worth it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.cli import main
from outrider.models.heads import files
from outrider.registry import TRAINED
from tests.training import grammar

FAST = "block"
"""The drafter of the fast tests; the slow ones train every other too."""
NUM_STEPS = 80
SETTINGS = ["--batch-tokens", "768", "--learning-rate", "0.01", "--vocabulary", "64", "--held-out", "0.1"]
SHAPES = {
    "small_model": "hidden=32 num_layers=2 num_heads=2 head_dim=16 intermediate=64 num_buckets=4",
    "eagle3": "unroll=3",
    "block": "num_anchors=8 block_size=4",
    "early_exit": "exit_layers=2",
}


@pytest.fixture(scope="module")
def target(taught, tmp_path_factory) -> str:
    """The taught module as a folder, with a tokenizer of one word an id."""
    folder = tmp_path_factory.mktemp("target")
    words = {f"w{token}": token for token in range(grammar.VOCAB)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    taught.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w0").save_pretrained(folder)
    return str(folder)


def write_prompts(path: Path, count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    rows = rng.integers(3, grammar.VOCAB, size=(count, grammar.PROMPT))
    path.write_text("".join(json.dumps({"prompt": " ".join(f"w{token}" for token in row)}) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def corpus(target, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("made")
    prompts = write_prompts(folder / "prompts.jsonl", 300, seed=1)
    out = folder / "corpus"
    assert main(["replies", target, "--prompts", prompts, "--out", str(out), "--max-tokens", "40"]) == 0
    return str(out)


def command(drafter: str, target: str, corpus: str, out: Path, steps: int = NUM_STEPS) -> list[str]:
    shape = [word for size in SHAPES.get(drafter, "").split() for word in ("--shape", size)]
    where = ["--target", target, "--corpus", corpus, "--out", str(out)]
    return ["train", drafter, *where, "--steps", str(steps), *SETTINGS, *shape, "--json"]


@pytest.fixture(scope="module")
def whole(target, corpus, tmp_path_factory) -> Path:
    """The folder of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / FAST
    assert main(command(FAST, target, corpus, out)) == 0
    return out


def train(words: list[str], capfd) -> SimpleNamespace:
    code = main(words)
    said = capfd.readouterr()
    return SimpleNamespace(code=code, err=said.err, json=json.loads(said.out.splitlines()[-1]))


def is_worth_it(drafter: str, target: str, out: Path) -> None:
    """On prompts that nobody trained on: tau of at least 1.3, its 95 % bootstrap interval over prompts above 1.2."""
    prompts = np.random.default_rng(9).integers(3, grammar.VOCAB, size=(40, grammar.PROMPT)).tolist()
    llm = LLM(target, drafter=drafter, drafter_model=str(out), depth=4, width=1, adaptive=False)
    results = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    accepted = np.array([result.tally.accepted for result in results])
    cycles = np.array([result.tally.cycles for result in results])
    interval = bootstrap(
        (accepted, cycles),
        lambda a, c: 1 + a.sum() / c.sum(),
        paired=True,
        vectorized=False,
        n_resamples=2000,
        random_state=0,
    ).confidence_interval
    assert 1 + accepted.sum() / cycles.sum() >= 1.3
    assert interval.low > 1.2


def test_a_drafter_is_worth_it_and_its_folder_says_so(target, whole):
    is_worth_it(FAST, target, whole)
    provenance = json.loads((whole / "provenance.json").read_text())
    assert provenance["figures"]["check"]["differing"] == 0
    assert f"tau {provenance['figures']['served']['tau']:.2f}" in (whole / "README.md").read_text()


def test_a_drafter_of_an_earlier_version_gets_what_it_lacks_when_it_is_proved(target, whole, tmp_path, capfd):
    config = json.loads((whole / "config.json").read_text())
    assert {"rotary", "says"} < config["target"].keys()
    folder = Path(shutil.copytree(whole, tmp_path / FAST))
    target_entry = {name: value for name, value in config["target"].items() if name not in ("rotary", "says")}
    earlier = {name: value for name, value in {**config, "target": target_entry}.items() if name != "seal"}
    (folder / "config.json").write_text(json.dumps(earlier))
    prompts = write_prompts(tmp_path / "p.jsonl", 2, seed=4)
    words = ["prove", str(folder), "--target", target, "--prompts", prompts, "--device", "cpu", "--json"]
    assert train(words, capfd).json["doubts"] == []
    assert json.loads((folder / "config.json").read_text()) == config


def test_another_rope_theta_is_told_by_the_engine_and_by_prove(target, whole, tmp_path, capfd):
    """Fault 34: its guesses would only be worse."""
    folder, other = Path(shutil.copytree(whole, tmp_path / FAST)), Path(shutil.copytree(target, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (other / "config.json").write_text(json.dumps(config))
    for served, expected in ((target, 0), (str(other), 1)):
        with closing(LLM(served, drafter=FAST, drafter_model=str(folder))) as llm:
            assert sum("rope theta" in note for note in llm.resolved.notes) == expected
    prompts = write_prompts(tmp_path / "p.jsonl", 2, seed=4)
    words = ["prove", str(folder), "--target", str(other), "--prompts", prompts, "--device", "cpu", "--json"]
    assert "rope theta" in train(words, capfd).json["doubts"][0]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [name for name in TRAINED if name != FAST])
def test_every_drafter_is_worth_it(drafter, target, corpus, tmp_path):
    out = tmp_path / drafter
    assert main(command(drafter, target, corpus, out)) == 0
    is_worth_it(drafter, target, out)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_weights(target, corpus, whole, tmp_path, capfd):
    """SIGKILL, which no program can answer, between two checkpoints; then the same command once more. The test of this
    name in test_loop.py kills and resumes within one process."""
    words = [*command(FAST, target, corpus, tmp_path / FAST), "--checkpoint-every", "7"]
    checkpoints = tmp_path / f"{FAST}.work" / "checkpoints"
    # The sums of a step depend on how many threads share them.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen([sys.executable, "-m", "outrider", *words], env=environment, stderr=subprocess.PIPE)
    while not list(checkpoints.glob("step-*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / FAST).exists()

    resumed = train(words, capfd)
    assert resumed.code == 0
    (begun,) = [report["note"] for report in resumed.json["curve"] if report["event"] == "note"]
    step = int(begun.removeprefix("goes on from step "))
    assert 7 <= step < NUM_STEPS
    expected, found = (files.read(folder).tensors for folder in (whole, tmp_path / FAST))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_training_goes_on_from_a_drafter(target, corpus, whole, tmp_path, capfd):
    out = tmp_path / "second"
    more = train([*command(FAST, target, corpus, out, steps=20), "--start-from", str(whole)], capfd)
    assert more.code == 0
    first = json.loads((whole / "provenance.json").read_text())["curve"][0]
    assert more.json["curve"][0]["done"] == first["done"]
    assert more.json["curve"][0]["figures"]["loss"] < first["figures"]["loss"]
    before, after = (files.read(folder).tensors for folder in (whole, out))
    assert before["kept_ids"].tolist() == after["kept_ids"].tolist()
    assert before.keys() == after.keys()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "ngram", "--target", "m", "--out", "o"], "unknown drafter to train 'ngram'"),
        (["train", "eagle", "--target", "m", "--out", "o"], "did you mean 'eagle3'?"),
        (["train", "eagle3", "--target", "no/such/model", "--out", "o"], "no/such/model"),
        (["train", "eagle3", "--target", "m", "--out", "o", "--prompts", "no.jsonl"], "no.jsonl"),
        (["train", "eagle3", "--target", "m", "--out", "o", "--steps", "0"], "steps=0"),
        (["train", "eagle3", "--target", "m", "--out", "o", "--shape", "wide"], "NAME=N"),
        (["train", "eagle3", "--target", "m", "--out", "o", "--loss", "cubic"], "cubic"),
    ],
)
def test_mistakes_are_one_sentence(words, part, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capfd.readouterr().err
    assert part in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_empty_prompts_file_is_refused_before_anything_is_made(target, tmp_path, capfd):
    (tmp_path / "empty.jsonl").write_text("\n")
    words = ["train", "eagle3", "--target", target, "--out", str(tmp_path / "o"), "--prompts"]
    assert main([*words, str(tmp_path / "empty.jsonl")]) == 2
    assert "holds no prompts" in capfd.readouterr().err
    assert not (tmp_path / "o.work").exists()


def test_a_drafter_that_changes_a_text_is_not_written(target, corpus, tmp_path, capfd, monkeypatch):
    from outrider.measure.lossless import Report

    monkeypatch.setattr(Report, "differing", property(lambda self: 3))
    out = tmp_path / "o"
    ran = train(command(FAST, target, corpus, out, steps=5), capfd)
    assert ran.code == 2
    assert "texts changed" in ran.err
    assert not out.exists()
    assert (tmp_path / "o.work" / "candidate" / "config.json").is_file()
