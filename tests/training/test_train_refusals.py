"""What `outrider train` refuses before anything is made: what would be lost, what would end the run hours later."""

from __future__ import annotations

import json

import pytest
import torch

from outrider.cli import main
from outrider.cli.train import _Job, _place, _rehearse
from outrider.errors import ConfigError, NumericsError, TrainingError
from outrider.models.heads import files
from outrider.registry import TRAINED
from outrider.training.checkpoint import fingerprint
from outrider.training.loop import train as run
from outrider.training.settings import TrainConfig
from outrider.training.shards import combined
from tests.models.tiny import make_module, make_tokenizer
from tests.training.grammar import VOCAB

LEAST = TrainConfig(steps=2, batch_tokens=256, vocabulary=32, held_out=0.1, evaluation_tokens=512, chunk=256)


def refused(*words, capfd) -> str:
    assert main(["train", "eagle3", "--target", "m", *words]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("place", ["notes.txt", "folder", "trained"])
def test_what_is_there_already_is_never_lost(place, tmp_path, capfd):
    kept = tmp_path / place
    if place == "notes.txt":
        kept.write_text("years of work")
    else:
        kept.mkdir()
        (kept / "notes.txt").write_text("years of work")
        if place == "trained":
            (kept / "config.json").write_text(json.dumps({"format": 1, "drafter": "eagle3"}))
    assert "is not free" in refused("--out", str(kept), capfd=capfd)
    assert "years of work" in (kept if kept.is_file() else kept / "notes.txt").read_text()
    with pytest.raises(FileExistsError):
        files.write(kept, {"drafter": "eagle3"}, {"a": torch.ones(1)}, {}, "")
    assert [path.name for path in tmp_path.iterdir()] == [place]


@pytest.mark.parametrize("out", [".", "", "/"])
def test_a_place_without_a_name_is_refused(out, capfd, tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").touch()
    monkeypatch.chdir(tmp_path)
    assert "is not free" in refused("--out", out, capfd=capfd)


def test_a_link_to_a_folder_is_followed(tmp_path):
    """What it leads to is replaced, and the link stays."""
    real, link = tmp_path / "real", tmp_path / "link"
    files.write(real, {"drafter": "eagle3"}, {"a": torch.ones(1)}, {}, "first")
    link.symlink_to(real)
    files.write(_place(str(link)), {"drafter": "eagle3"}, {"a": torch.ones(1)}, {}, "second")
    assert link.is_symlink()
    assert (real / "README.md").read_text() == "second"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--seconds", "-5"], "seconds=-5.0"),
        (["--seconds", "nan"], "seconds=nan"),
        (["--steps", "5", "--seconds", "5"], "either steps or seconds"),
        (["--learning-rate", "nan"], "learning_rate=nan"),
        (["--learning-rate", "-1"], "learning_rate=-1.0"),
        (["--clip", "0"], "clip=0.0"),
        (["--seed", "-1"], "seed=-1"),
        (["--weight-decay", "-3"], "weight_decay=-3.0"),
        (["--measure-every", "-1"], "measure_every=-1"),
        (["--final-rate", "nan"], "final_rate=nan"),
        (["--checkpoint-seconds", "0"], "checkpoint_seconds=0"),
        (["--measure-on", "gpu"], "device 'gpu' is unknown"),
        (["--shape", "unroll=²"], "NAME=N"),
        (["--shape", "unroll=0"], "NAME=N"),
        (["--shape", "foo=3"], "unknown setting 'foo'"),
        (["--reply-tokens", "0"], "num_tokens=0"),
        (["--start-from", "~nobody-at-all/x"], "no trained drafter"),
        (["--corpus", "c", "--prompts", "p"], "leave out prompts, or corpus"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(words, part, tmp_path, capfd):
    assert part in refused("--out", str(tmp_path / "o"), *words, capfd=capfd)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("drafter", "model", "words", "part"),
    [
        ("eagle3", "gpt2", [], "gpt2 has no one table of rotary positions: train medusa or small_model instead"),
        ("block", "opt", [], "opt has no one table of rotary positions: train medusa or small_model instead"),
        ("eagle3", "gemma3", [], "gemma3_text has no one table of rotary positions"),
        ("early_exit", "llama", ["--shape", "exit_layers=3"], "exit_layers=3 leaves nothing to exit from"),
    ],
)
def test_what_a_target_does_not_allow_is_refused_before_it_says_a_word(
    drafter, model, words, part, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr("outrider.cli.train.plain_engine", lambda *_: pytest.fail("replies were to be made"))
    make_module(model).save_pretrained(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    where = ["--target", str(tmp_path / "m"), "--out", str(tmp_path / "o")]
    assert main(["train", drafter, *where, *words]) == 2
    assert part in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("drafter", TRAINED)
@pytest.mark.parametrize("model", ["llama_dynamic", "phi3_longrope", "gpt_oss"])
def test_rotary_positions_of_any_kind_are_not_refused(drafter, model, tmp_path):
    make_module(model).save_pretrained(tmp_path / "m")
    _rehearse(_Job(drafter, str(tmp_path / "m"), tmp_path / "o", "cpu"), {})


def test_a_drafter_of_numbers_that_are_none_is_not_made(taught, replies, tmp_path):
    """However short the run: no report may have come before its end."""
    with torch.no_grad():
        weight = taught.model.layers[2].mlp.down_proj.weight
        before = weight.clone()
        weight.fill_(float("nan"))
    try:
        with pytest.raises(NumericsError, match="lower the learning rate"):
            run("eagle3", taught, replies, LEAST, work=tmp_path, vocab_size=VOCAB)
    finally:
        weight.data.copy_(before)


def test_a_run_goes_on_with_its_own_target_corpus_and_beginning_alone(taught, replies, tmp_path):
    def go(**more):
        return run("medusa", taught, replies, LEAST, work=tmp_path, vocab_size=VOCAB, **more)

    made = go()
    with pytest.raises(TrainingError, match="another start_from"):
        go(initial=made.tensors)
    replies.tokens[0] += 1
    try:
        with pytest.raises(TrainingError, match="another corpus"):
            go()
    finally:
        replies.tokens[0] -= 1
    weight = taught.model.layers[0].mlp.down_proj.weight
    weight.data[0, 0] += 1
    try:
        with pytest.raises(TrainingError, match="another target"):
            go()
    finally:
        weight.data[0, 0] -= 1


def test_weights_have_one_fingerprint_in_every_float_type():
    weights = [torch.arange(40.0).view(5, 8), torch.tensor(3.5)]
    assert fingerprint(weights) == fingerprint([weight.bfloat16() for weight in weights])
    assert fingerprint(weights) != fingerprint([weights[0], torch.tensor(3.0)])


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"sha256": 3}'])
def test_a_corpus_without_a_summary_is_refused(text, tmp_path):
    if text is not None:
        (tmp_path / "corpus.json").write_text(text)
    with pytest.raises(ConfigError, match="run `outrider replies` again"):
        combined([tmp_path])
