"""Every kind learns a tiny target's grammar; a killed run ends with the same weights; what goes wrong is said."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from accelerate import Accelerator

from outrider.errors import ConfigError, NumericsError, TrainingError
from outrider.registry import TRAINED
from outrider.training.harvest import Harvester
from outrider.training.loop import USABLE, train
from outrider.training.settings import MEASURED_STEPS, TrainConfig, rate
from tests.training.grammar import END, VOCAB

SIZES = {
    "small_model": {
        "hidden": 32,
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 16,
        "intermediate": 64,
        "num_buckets": 4,
    },
    "block": {"num_anchors": 8, "block_size": 4},
    "eagle3": {"unroll": 3},
    "early_exit": {"exit_layers": 2},
}
SHORT = TrainConfig(
    steps=100,
    batch_tokens=768,
    vocabulary=56,
    chunk=512,
    held_out=0.1,
    evaluation_tokens=4096,
    learning_rate=3e-2,
    log_every=10,
    evaluate_every=1000,
)


class Killed(BaseException):
    """As abrupt as a signal: nothing in the package catches it."""


def learn(drafter, module, corpus, folder, config=SHORT, **more):
    more.setdefault("settings", SIZES.get(drafter))
    return train(drafter, module, corpus, config, work=folder, vocab_size=VOCAB, eos_ids=[END], **more)


@pytest.fixture(scope="module")
def learnt(taught, replies, tmp_path_factory):
    """What came out of a whole run of a kind, and what was reported on the way; each is run once."""
    runs = {}

    def get(drafter):
        if drafter not in runs:
            heard = []
            trained = learn(drafter, taught, replies, tmp_path_factory.mktemp(drafter), progress=heard.append)
            runs[drafter] = trained, heard
        return runs[drafter]

    return get


@pytest.mark.parametrize("drafter", TRAINED)
def test_every_kind_learns(drafter, taught, replies, learnt, tmp_path):
    config = replace(SHORT, evaluate_every=1)
    first = learn(drafter, taught, replies, tmp_path / "one", replace(config, steps=1, learning_rate=1e-6))
    trained, heard = learnt(drafter)
    before, after = first.figures["held_out"], trained.figures["held_out"]
    assert after["loss"] < before["loss"]
    # Chance is 1/56; a fresh module says what the target's states say of the token before, or nothing.
    assert after["hit"][0] > 0.6
    assert all(hit > 0.4 for hit in after["hit"])
    assert after["tau"] > max(2.0, before["tau"])
    assert after["tau"] <= 1 + len(after["hit"])
    assert {report.event for report in heard} == {"train", "held_out"}
    assert [report.done for report in heard if report.event == "train"] == list(range(10, 101, 10))
    assert trained.curve[-1]["figures"] == after
    assert trained.figures["steps"] == 100


def test_medusa_states_the_rates_of_its_ranks(learnt):
    trained, _ = learnt("medusa")
    rates = trained.tensors["rates"]
    assert rates.shape == (5, 8)
    assert ((rates >= 0) & (rates.sum(dim=1, keepdim=True) <= 1 + 1e-6)).all()
    assert rates[0, 0].item() == pytest.approx(trained.figures["held_out"]["hit"][0], abs=0.02)
    assert (rates[:, 0] >= rates[:, 1]).all()


@pytest.mark.parametrize(
    "drafter", ["block", *(pytest.param(name, marks=pytest.mark.slow) for name in ("medusa", "small_model"))]
)
def test_a_killed_run_ends_with_the_same_weights(drafter, taught, replies, tmp_path):
    # More steps than one pass over the corpus has, so that the place in a later pass is found again.
    config = replace(SHORT, steps=24, checkpoint_every=7, accumulate=2)
    whole = learn(drafter, taught, replies, tmp_path / "whole", config)
    assert whole.figures["epochs"] > 1

    def kill(report):
        if report.done == 20:
            raise Killed

    with pytest.raises(Killed):
        learn(drafter, taught, replies, tmp_path / "killed", config, progress=kill)
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["step-00000014"]
    heard = []
    resumed = learn(drafter, taught, replies, tmp_path / "killed", config, progress=heard.append)
    assert heard[0].note == "goes on from step 14"
    assert resumed.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, resumed.tensors[name]), name
    assert resumed.figures["held_out"] == whole.figures["held_out"]
    assert resumed.figures["tokens"] == whole.figures["tokens"]


class Clock:
    """Seconds as steps take them: `pace` each, `slow` from step `MEASURED_STEPS` on."""

    def __init__(self, pace, slow, monkeypatch):
        self.now, self.harvested = 100.0, 0
        harvest = Harvester.__call__

        def slowly(harvester, batch):
            self.harvested += 1
            self.now += pace if self.harvested <= MEASURED_STEPS else slow
            return harvest(harvester, batch)

        monkeypatch.setattr(Harvester, "__call__", slowly)
        for module in ("loop", "report"):  # theirs alone: a server that waits in this process goes by the true time
            monkeypatch.setattr(f"outrider.training.{module}.time", self)

    def monotonic(self):
        return self.now


def test_a_timed_run_sets_its_horizon_once(taught, replies, tmp_path, monkeypatch):
    Clock(0.1, 0.1, monkeypatch)
    config = replace(SHORT, steps=None, seconds=12.0)
    heard = []
    trained = learn("early_exit", taught, replies, tmp_path, config, progress=heard.append)
    # After 40 steps of 0.1 s there are 8 s left, of which USABLE go into steps.
    horizon = 40 + int(8 * USABLE / 0.1)
    assert {report.horizon for report in heard if report.done <= MEASURED_STEPS} >= {None}
    assert {report.horizon for report in heard if report.done > MEASURED_STEPS} == {horizon}
    assert trained.figures["steps"] == horizon
    assert trained.figures["seconds"] <= 12.0
    last = [report.figures["learning_rate"] for report in heard if report.event == "train"][-1]
    assert last < 0.01 * SHORT.learning_rate
    again = learn("early_exit", taught, replies, tmp_path, config)  # it is over: nothing more is learnt
    assert again.figures["steps"] == horizon
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in trained.tensors.items())


@pytest.mark.slow
def test_a_timed_run_that_gets_faster_early_does_more(taught, replies, tmp_path, monkeypatch):
    """As where shapes are compiled in the first steps: what is known after 40 steps is not the last word."""
    Clock(0.1, 0.05, monkeypatch)
    config = replace(SHORT, steps=None, seconds=45.0)
    heard = []
    trained = learn("early_exit", taught, replies, tmp_path, config, progress=heard.append)
    first, second = 40 + int(41 * USABLE / 0.1), 80 + int(39 * USABLE / 0.05)
    assert [horizon for horizon, _ in groupby(report.horizon for report in heard)] == [None, first, second]
    assert trained.figures["steps"] == second
    assert trained.figures["seconds"] <= 45.0


def test_a_timed_run_that_slows_down_ends_in_time(taught, replies, tmp_path, monkeypatch):
    Clock(0.1, 0.4, monkeypatch)
    heard = []
    config = replace(SHORT, steps=None, seconds=11.5)
    trained = learn("early_exit", taught, replies, tmp_path, config, progress=heard.append)
    assert any("time is over" in report.note for report in heard)
    assert trained.figures["steps"] == 60
    assert trained.figures["seconds"] < 11.5 + 10 * 0.4


def test_the_learning_rate_rises_and_falls():
    config = TrainConfig(steps=100, warmup=0.1, final_rate=0.01)
    rates = [rate(config, done, 100) for done in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == 1
    assert rates[55] == pytest.approx((1 + 0.01) / 2)
    assert rates[100] == pytest.approx(0.01)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_the_hook_is_asked_for_served_figures(taught, replies, tmp_path):
    asked = []

    def measure(trained):
        asked.append(trained)
        return {"served_tau": 1.5}

    config = replace(SHORT, steps=20, measure_every=8)
    trained = learn("medusa", taught, replies, tmp_path, config, measure=measure)
    assert [so_far.figures["steps"] for so_far in asked] == [8, 16]
    assert all(so_far.tensors.keys() == trained.tensors.keys() for so_far in asked)
    served = [report for report in trained.curve if report["event"] == "measured"]
    assert [report["figures"] for report in served] == [{"served_tau": 1.5}] * 2


def test_fused_functions_learn_the_same(taught, replies, tmp_path):
    """A compiler may add up in another order, but not learn something else; where it fails, training goes on."""
    config = replace(SHORT, steps=6, log_every=6)
    plain = learn("medusa", taught, replies, tmp_path / "plain", replace(config, fuse=False))

    def broken(function, **_):
        def fail(*_args, **_kwargs):
            raise RuntimeError("no compiler here")

        return fail

    heard = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", broken)
        fallen = learn(
            "medusa", taught, replies, tmp_path / "fallen", replace(config, fuse=True), progress=heard.append
        )
    assert "no compiler here" in heard[0].note
    assert all(torch.equal(fallen.tensors[name], tensor) for name, tensor in plain.tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize("drafter", TRAINED)
def test_compiled_kinds_learn_what_plain_ones_learn(drafter, taught, replies, tmp_path):
    config = replace(SHORT, steps=30, log_every=30)
    plain = learn(drafter, taught, replies, tmp_path / "plain", replace(config, fuse=False))
    heard = []
    fused = learn(drafter, taught, replies, tmp_path / "fused", replace(config, fuse=True), progress=heard.append)
    assert not [report.note for report in heard if report.event == "note"]
    assert fused.figures["held_out"]["loss"] == pytest.approx(plain.figures["held_out"]["loss"], rel=0.02)


def test_a_full_disk_leaves_the_last_checkpoint(taught, replies, tmp_path, monkeypatch):
    config = replace(SHORT, steps=20, checkpoint_every=5)
    save, calls = Accelerator.save_state, []

    def fill(self, output_dir, **settings):
        calls.append(output_dir)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, output_dir, **settings)

    monkeypatch.setattr(Accelerator, "save_state", fill)
    with pytest.raises(TrainingError, match=r"No space left on device.*goes on from the last one"):
        learn("medusa", taught, replies, tmp_path, config)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert learn("medusa", taught, replies, tmp_path, config).figures["steps"] == 20


def test_another_runs_folder_is_refused(taught, replies, tmp_path):
    config = replace(SHORT, steps=2)
    learn("medusa", taught, replies, tmp_path, config)
    with pytest.raises(TrainingError, match="another learning_rate"):
        learn("medusa", taught, replies, tmp_path, replace(config, learning_rate=0.5))
    for file in next(tmp_path.iterdir()).glob("*.safetensors"):
        file.write_bytes(b"cut short")
    with pytest.raises(TrainingError, match="damaged"):
        learn("medusa", taught, replies, tmp_path, config)


def test_a_loss_that_is_no_number_ends_the_run(taught, replies, tmp_path):
    with pytest.raises(NumericsError, match="lower the learning rate"):
        learn("early_exit", taught, replies, tmp_path, replace(SHORT, learning_rate=1e38))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": None}, "either steps or seconds"),
        ({"seconds": 9.0}, "either steps or seconds"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"held_out": 1.0}, "held_out"),
        ({"log_every": 0}, "log_every"),
    ],
)
def test_settings_out_of_range_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        replace(SHORT, **change)


def test_unknown_names_are_refused(taught, replies, tmp_path):
    with pytest.raises(ConfigError, match="eagle3"):
        learn("eagle", taught, replies, tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'num_heads'"):
        learn("medusa", taught, replies, tmp_path, settings={"num_head": 3})
    with pytest.raises(ConfigError, match="forward_kl"):
        learn("medusa", taught, replies, tmp_path, replace(SHORT, loss="mse"))
