"""`outrider replies` and `outrider train`, end to end on a CPU: a tiny target, and a drafter that is worth it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file
from scipy.stats import bootstrap
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.cli import main
from outrider.models.heads import files
from tests.training import grammar

STEPS = ("--steps", "160", "--batch-tokens", "2048", "--vocabulary", "64", "--held-out", "0.1")


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


def train(*words: str, capfd) -> SimpleNamespace:
    code = main(["train", *words, "--json"])
    said = capfd.readouterr()
    return SimpleNamespace(code=code, err=said.err, json=json.loads(said.out.splitlines()[-1]))


@pytest.mark.parametrize("drafter", ["eagle3", "block"])
def test_a_drafter_is_worth_it_on_prompts_that_nobody_trained_on(drafter, target, corpus, tmp_path, capfd):
    """Tau of at least 1.3, the 95 % bootstrap interval over prompts above 1.2."""
    out = tmp_path / drafter
    ran = train(drafter, "--target", target, "--corpus", corpus, "--out", str(out), *STEPS, capfd=capfd)
    assert (ran.code, ran.json["figures"]["check"]["differing"]) == (0, 0)
    assert json.loads((out / "provenance.json").read_text()) == ran.json
    card = (out / "README.md").read_text()
    assert f"tau {ran.json['figures']['served']['tau']:.2f}" in card

    prompts = np.random.default_rng(9).integers(3, grammar.VOCAB, size=(40, grammar.PROMPT)).tolist()
    llm = LLM(target, drafter=drafter, drafter_model=str(out), depth=4, width=1, adaptive=False)
    results = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    accepted = np.array([result.tally.accepted for result in results])
    cycles = np.array([result.tally.cycles for result in results])
    interval = bootstrap(
        (accepted, cycles), lambda a, c: 1 + a.sum() / c.sum(), paired=True, vectorized=False, random_state=0
    ).confidence_interval
    assert 1 + accepted.sum() / cycles.sum() >= 1.3
    assert interval.low > 1.2


def test_training_goes_on_from_a_drafter(target, corpus, tmp_path, capfd):
    first, second = tmp_path / "first", tmp_path / "second"
    short = ("--steps", "20", *STEPS[2:])
    common = ("--target", target, "--corpus", corpus)
    assert train("eagle3", *common, "--out", str(first), *short, capfd=capfd).code == 0
    more = train("eagle3", *common, "--out", str(second), *short, "--start-from", str(first), capfd=capfd)
    assert more.code == 0
    curves = [json.loads((folder / "provenance.json").read_text())["curve"] for folder in (first, second)]
    assert curves[1][0]["figures"]["loss"] < curves[0][0]["figures"]["loss"]
    kept = [files.read(folder).tensors["kept_ids"].tolist() for folder in (first, second)]
    assert kept[0] == kept[1]
    assert load_file(first / "model.safetensors").keys() == load_file(second / "model.safetensors").keys()


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
    ran = train(
        "eagle3", "--target", target, "--corpus", corpus, "--out", str(out), *STEPS[2:], "--steps", "5", capfd=capfd
    )
    assert ran.code == 2
    assert "texts changed" in ran.err
    assert not out.exists()
    assert (tmp_path / "o.work" / "candidate" / "config.json").is_file()
