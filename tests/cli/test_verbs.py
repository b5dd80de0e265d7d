"""What the verbs print, and where: answers on stdout, remarks on a terminal only, one JSON object on the last line."""

from __future__ import annotations

import io
import json

import pytest

import outrider.kernels
from outrider.cli.doctor import kernels, machine
from outrider.cli.generate import as_object
from outrider.cli.session import session
from outrider.errors import RequestError
from outrider.registry import CASCADES, DRAFTERS, NEED_WEIGHTS
from tests.cli.fakes import CONTRACT, FakeLLM


def last_object(ran) -> dict:
    return json.loads(ran.out.splitlines()[-1])


def test_generate_json_keeps_the_contract(run, engines):
    ran = run("generate", "m", "hello", "--json", "--max-tokens", "5")
    assert (ran.code, ran.err) == (0, "")
    data = last_object(ran)
    assert {name: type(data[name]) for name in CONTRACT} == CONTRACT
    assert ran.out.count("\n") == 1
    assert engines[0].closed


def test_generate_streams_text_only_when_nobody_watches(run, engines):
    ran = run("generate", "m", "hello", "--max-tokens", "5")
    (expected,) = FakeLLM("m", {}).generate("hello", engines[0].asked[0][1])
    assert (ran.out, ran.err) == (expected.text + "\n", "")


def test_generate_raw_reaches_the_engine(run, engines):
    run("generate", "m", "hello", "--raw", "--json")
    assert engines[0].asked[0][2] is True


def test_several_samples_keep_the_contract_and_list_all(run, engines):
    data = last_object(run("generate", "m", "hello", "--n", "3", "--json"))
    assert len(data["samples"]) == 3
    assert {**data["samples"][0], "samples": data["samples"]} == data
    assert len({sample["text"] for sample in data["samples"]}) == 3
    assert as_object([{"text": "a"}]) == {"text": "a"}


def test_a_failed_request_exits_2(run, engines, monkeypatch):
    monkeypatch.setattr(FakeLLM, "_result", _failing(FakeLLM._result))
    for words in (["--json"], []):
        ran = run("generate", "m", "hello", *words)
        assert ran.code == 2
        assert "NaN" in ran.err


def _failing(real):
    def result(self, *args):
        made = real(self, *args)
        made.error = "the logits at position 3 are NaN: choose another dtype"
        return made

    return result


def chat(run, monkeypatch, text: str, *words: str):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return run("chat", "m", "--max-tokens", "3", *words)


def test_chat_hands_over_the_whole_conversation(run, engines, monkeypatch):
    ran = chat(run, monkeypatch, "one\n\ntwo\n/exit\nthree\n", "--system", "be brief")
    assert ran.code == 0
    first, second = (prompt for prompt, _, _ in engines[0].asked)
    answer = ran.out.splitlines()[0]
    assert first == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    assert second == [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "two"}]
    assert len(engines) == 1  # one engine for all turns: its prefix cache is what keeps the keys
    assert engines[0].closed


def test_chat_commands(run, engines, monkeypatch):
    chat(run, monkeypatch, "one\n/reset\ntwo\nthree\n/undo\nfour\n/nonsense\n/help\n")
    asked = [[m["content"] for m in prompt if m["role"] == "user"] for prompt, _, _ in engines[0].asked]
    assert asked == [["one"], ["two"], ["two", "three"], ["two", "four"]]


def test_a_turn_that_fails_is_forgotten(run, engines, monkeypatch):
    real = FakeLLM.stream

    def stream(self, messages, params, raw=False):
        if messages[-1]["content"] == "bad":
            raise RequestError("the prompt is too long: shorten it")
        if messages[-1]["content"] == "slow":
            raise KeyboardInterrupt
        return real(self, messages, params, raw)

    monkeypatch.setattr(FakeLLM, "stream", stream)
    ran = chat(run, monkeypatch, "bad\nslow\ngood\n")
    assert ran.code == 0
    assert ran.err == "outrider: the prompt is too long: shorten it\n"
    assert [prompt for prompt, _, _ in engines[0].asked] == [[{"role": "user", "content": "good"}]]


def test_chat_input_that_is_no_text_is_refused(run, engines, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    ran = run("chat", "m")
    assert (ran.code, engines[0].closed) == (2, True)
    assert "not UTF-8" in ran.err


def test_check_json(run, engines, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"turns": ["b", "c"]}\n{"prompt": "d"}\n')
    ran = run("check", "m", "--drafter", "all", "--prompts", str(file), "--limit", "2", "--max-tokens", "6", "--json")
    data = last_object(ran)
    assert (ran.code, ran.err) == (0, "")
    every = [name for name in (*DRAFTERS, *CASCADES) if name not in NEED_WEIGHTS]  # none were trained for "m"
    assert [c["drafter"] for c in data["comparisons"]] == [name for name in every for _ in range(2)]
    assert (data["compared"], data["differing"], data["first_difference"]) == (2 * 2 * len(every), 0, None)
    assert data["tau"] == 3.0
    assert data["ratio"] > 0
    assert all(engine.closed for engine in engines)


def test_check_gives_each_drafter_its_own_settings_only(run, engines):
    words = ("--drafter-model", "tiny", "--exit-layers", "2", "--share-history", "--threads", "1", "--limit", "1")
    assert run("check", "m", "--drafter", "all", *words, "--max-tokens", "2").code == 0
    given = {engine.settings["drafter"]: engine.settings for engine in engines}
    assert given.keys() == {"none", *DRAFTERS, *CASCADES} - {*NEED_WEIGHTS}
    for drafter, own in {
        "none": {},
        "ngram": {},
        "suffix": {"share_history": True},
        "small_model": {"drafter_model": "tiny"},
        "early_exit": {"exit_layers": 2},
        "ngram+small_model": {"drafter_model": "tiny"},
    }.items():
        assert given[drafter] == {"drafter": drafter, "threads": 1, **own}


def test_check_reports_a_difference_and_exits_1(run, engines, monkeypatch):
    monkeypatch.setattr(FakeLLM, "_result", _broken(FakeLLM._result, "ngram", 2))
    words = ("check", "m", "--drafter", "ngram", "--limit", "1", "--max-tokens", "4", "--temperature", "0")
    ran = run(*words, "--json")
    assert ran.code == 1
    first = last_object(ran)["first_difference"]
    assert (first["drafter"], first["position"], first["other"], first["margin"]) == ("ngram", 2, 99, 0.25)
    assert "position 2 is 99" in run(*words).out


def _broken(real, drafter, position):
    def result(self, *args):
        self.broken = {drafter: position}
        return real(self, *args)

    return result


@pytest.mark.usefixtures("engines")
def test_check_of_nothing_but_refusals_exits_2(run, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "too long"}\n')
    ran = run("check", "m", "--drafter", "ngram", "--prompts", str(file))
    assert ran.code == 2
    assert "shorten it" in ran.err


def test_demo(run, engines):
    ran = run("demo", "m", "--max-tokens", "6")
    assert ran.code == 0
    assert "identical: yes" in ran.out
    assert [engine.settings["drafter"] for engine in engines] == ["none", "auto"]
    assert "\x1b" not in ran.out  # colours are for terminals


def test_demo_json(run, engines):
    data = last_object(run("demo", "m", "--max-tokens", "6", "--json"))
    assert data["identical"] is True
    assert data["tau"] == 3.0


def test_demo_that_differs_exits_1(run, engines, monkeypatch):
    monkeypatch.setattr(FakeLLM, "_result", _broken(FakeLLM._result, "auto", 1))
    ran = run("demo", "m", "--max-tokens", "6")
    assert ran.code == 1
    assert "identical: no" in ran.out


def test_doctor_knows_the_machine():
    report = machine()
    assert report["versions"]["torch"]
    assert report["devices"][0] == "cpu"
    assert report["processors"] >= 1


class FakeTriton:
    """A GPU's kernels as the self-test leaves them."""

    name, note, fixed_width, queries, tile = "triton", None, None, None, None

    def keep_one_tile(self) -> None:
        """Every tile has the same bits."""


def on_a_fake_gpu(monkeypatch, failed: tuple[str, ...] = (), fake: type = FakeTriton) -> None:
    outcomes = [
        outrider.kernels.TestOutcome(name, name not in failed, "at width 5") for name in ("linear bfloat16", "rms_norm")
    ]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "A large card")
    monkeypatch.setattr("outrider.kernels.self_test", lambda kernels, device: outcomes)
    real = outrider.kernels.select
    monkeypatch.setattr(
        "outrider.kernels.select", lambda kind, device, *more: fake() if device.type == "cuda" else real(kind, device)
    )


def test_doctor_on_a_gpu_tells_tiles_widths_and_the_way(run, engines, monkeypatch):
    on_a_fake_gpu(monkeypatch)
    decided = {"way": "lean", "fixed_width": None, "memory": {"slots": 8}, "start": {"weights": 3.0}}
    monkeypatch.setattr(FakeLLM, "describe", lambda self: decided)
    monkeypatch.setattr(FakeLLM, "encode", lambda self, text, raw: [1, 2], raising=False)
    monkeypatch.setattr("outrider.cli.doctor.numerics", lambda llm, engine, texts: {})
    data = last_object(run("doctor", "m", "--limit", "1", "--json"))
    assert data["machine"]["devices"] == ["cpu", "A large card"]
    assert data["gpu_kernels"] == {
        "name": "triton",
        "fixed_width": None,
        "tiles": "equal in every bit",
        "self_test": {"linear bfloat16": "passed", "rms_norm": "passed"},
    }
    assert data["model"] == decided
    assert "tiles: equal in every bit" in run("doctor").out


def test_doctor_tells_of_tiles_that_differ_and_of_kernels_that_fail(monkeypatch):
    class OneTile(FakeTriton):
        def keep_one_tile(self) -> str:
            self.tile = (32, 64)
            return "linears run by one tile, slower"

    on_a_fake_gpu(monkeypatch, failed=("rms_norm",), fake=OneTile)
    found = kernels("cuda")
    assert found["tiles"] == "linears kept to one: their bits differ"
    assert found["fixed_width"] == 16
    assert found["self_test"] == {"linear bfloat16": "passed", "rms_norm": "at width 5"}
    assert "linears run by one tile" in found["note"]
    assert "rows of rms_norm depend on their number" in found["note"]


def test_a_session_always_closes(engines):
    with pytest.raises(ZeroDivisionError), session("m", {}):
        raise ZeroDivisionError
    assert engines[0].closed


def test_doctor(run, engines, monkeypatch):
    monkeypatch.setattr(
        "outrider.cli.doctor.numerics", lambda llm, engine, texts: {"mean_kl": 0.0, "texts": len(texts)}
    )
    monkeypatch.setattr(FakeLLM, "encode", lambda self, text, raw: [1, 2] if raw else [], raising=False)
    data = last_object(run("doctor", "m", "--limit", "2", "--json"))
    assert set(data["kernels"]["self_test"].values()) == {"passed"}
    assert data["model"] == {"device": "cpu", "notes": ["a toy"]}
    assert data["numerics"] == {"mean_kl": 0.0, "texts": 2}
    shown = run("doctor", "m").out
    assert "dtype float32, because this is a toy" in shown
    assert "target's weights: 1 MiB" in shown
    assert "a toy" in shown


def test_weights_go_to_the_drafter_that_they_were_trained_for(run, engines, tmp_path):
    (tmp_path / "config.json").write_text('{"format": 1, "drafter": "eagle3", "target": {"name": "elsewhere"}}')
    assert run("check", "m", "--drafter", "all", "--drafter-model", str(tmp_path), "--limit", "1").code == 0
    given = {engine.settings["drafter"]: engine.settings.get("drafter_model") for engine in engines}
    assert given.pop("eagle3") == str(tmp_path)
    assert "medusa" not in given
    assert "small_model" in given
    assert set(given.values()) == {None}
