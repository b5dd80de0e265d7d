"""The device's part of a cycle: on real layers, on Triton's kernels, and as graphs whose crews are filled up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider import LLM
from outrider.engine.device_cycle import CycleGraphs, _Captured
from outrider.kernels.graph_pool import GraphPool
from outrider.request import SamplingParams
from tests import artefacts, toy
from tests.engine.test_pipeline import ON_DEVICE, flown, tallies
from tests.engine.test_same_text import plain_text, prompts
from tests.kernels.conftest import make_triton
from tests.models.tiny import make_module, make_target, make_tokenizer

PROMPTS = [(5, 6, 7), (9, 8, 7, 6, 5), tuple(range(10, 30))]


class Replayed(CycleGraphs):
    """Captures by keeping the call, so that what reaches a graph is seen on a machine without a GPU."""

    def __init__(self) -> None:
        super().__init__(GraphPool())
        self.crews: list[int] = []

    def _capture(self, index, run):
        self.crews.append(index.shape[0])
        for _ in range(2):
            results = run(index).clone()

        def replay():
            results.copy_(run(index))

        return _Captured(SimpleNamespace(replay=replay), index, results)


@pytest.mark.parametrize("drafter", ["none", *ON_DEVICE])
@pytest.mark.parametrize("width", [1, 3])
def test_graphs_of_filled_crews_change_nothing(drafter: str, width: int) -> None:
    """Seats that nobody takes fill a crew up; warm-ups and captures run over them alone, beside cycles in the air."""
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=7)
    texts = prompts(5, seed=3)
    found = []
    for graphs in (None, Replayed()):
        engine = toy.make_engine(drafter, depth=3, width=width, in_flight=2, blocks=300, max_rows=200)
        engine.pipeline._cycle._graphs = graphs
        requests = [toy.make_request(i, prompt, params) for i, prompt in enumerate(texts)]
        toy.run(engine, requests)
        assert [r.output for r in requests] == [plain_text(list(r.prompt), params, []) for r in requests]
        found.append(tallies(requests))
    assert found[0] == found[1]
    assert 6 in graphs.crews, "five requests are no crew of their own"
    assert len(graphs.crews) == len(set(graphs._captured)), "a shape was captured twice"


def test_a_cycle_says_that_graphs_were_taken_meanwhile() -> None:
    engine = toy.make_engine("small_model", depth=3, in_flight=2, blocks=300)
    engine.pipeline._cycle._graphs = graphs = Replayed()
    for number in range(2):
        engine.add(toy.make_request(number, [1, 2, 3], SamplingParams(max_tokens=30)))
        records = []
        while not engine.scheduler.is_idle:
            records.append(engine.step()[1])
        assert sum(record.captures for record in records) == (1 if number == 0 else 0)
    assert graphs.crews == [1]


def test_a_target_of_one_width_flies_where_one_pass_holds_a_cycle() -> None:
    """A wider batch is split on the host, which a graph cannot be taken of: it runs in lockstep."""
    for nodes, flies in ((3, True), (4, False)):
        engine = toy.make_engine("small_model", depth=nodes, in_flight=2, target=toy.ToyTarget(fixed_width=4))
        engine.pipeline._cycle._graphs = graphs = Replayed()
        params = SamplingParams(max_tokens=20)
        request = toy.make_request(0, [1, 2, 3], params)
        assert toy.run(engine, [request]) == [plain_text([1, 2, 3], params, [])]
        assert bool(graphs.crews) is flies


def test_where_a_capture_fails_cycles_run_as_they_are() -> None:
    class Failing(CycleGraphs):
        def _capture(self, index, run):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    engine = toy.make_engine("small_model", depth=3, in_flight=2, blocks=300)
    engine.pipeline._cycle._graphs = Failing(GraphPool())
    params = SamplingParams(max_tokens=20)
    request = toy.make_request(0, [1, 2, 3], params)
    assert toy.run(engine, [request]) == [plain_text([1, 2, 3], params, [])]
    assert "operation not permitted" in engine.pipeline.note
    assert "more" not in engine.pipeline.note


def test_the_graph_that_was_used_longest_ago_gives_way(monkeypatch) -> None:
    graphs = Replayed()
    monkeypatch.setattr(graphs.pool, "has_room", lambda nbytes: len(graphs._captured) < 2)
    index = torch.tensor([3])
    for key in ("a", "b", "a", "c", "a", "b"):
        assert graphs(key, index, torch.tensor([9]), lambda crew: crew * 2).tolist() == [6]
    assert list(graphs._captured) == ["a", "b"]
    assert len(graphs.crews) == 4


def test_where_no_memory_is_planned_for_it_a_cycle_runs_as_it_is() -> None:
    graphs = Replayed()
    graphs.pool.limit = 1
    for _ in range(2):
        assert graphs("a", torch.tensor([3]), torch.tensor([9]), lambda crew: crew * 2).tolist() == [6]
    assert not graphs.crews
    assert "MiB are planned for all" in graphs.note


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    make_module("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def said(folder: str, drafter: str, in_flight: int, prompts=PROMPTS, max_tokens: int = 24, law=None, **own):
    """What real layers say at T = 1 and T = 0, every cycle guessing three levels, and how the guesses fared."""
    settings = artefacts.settings(drafter, make_target(make_module("llama"))) if drafter != "none" else {}
    own = {"self_test": False, **settings, **own}
    llm = LLM(folder, drafter=drafter, in_flight=in_flight, depth=3, adaptive=False, num_slots=512, **own)
    llm.engine.strict = True
    assert llm.resolved.in_flight == in_flight
    cycles = flown(llm.engine) if in_flight else [1]
    heat = (1.0, 0.0, 1.0)[: len(prompts)]
    params = [SamplingParams(max_tokens=max_tokens, temperature=t, seed=5, ignore_eos=True, **law or {}) for t in heat]
    results = llm.generate(prompts, params, raw=True)
    assert cycles
    return [(r.token_ids, r.tally.accepted if own.get("width", 1) == 1 else None) for r in results]


@pytest.mark.parametrize("drafter", ["none", *ON_DEVICE])
@pytest.mark.parametrize("width", [1, 3])
def test_real_layers_say_and_guess_the_same(folder, drafter, width):
    assert said(folder, drafter, 0, width=width) == said(folder, drafter, 2, width=width)


LAW = {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.3, "presence_penalty": 0.2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "width", "law"), [("eagle3", 3, None), ("small_model", 1, None), ("block", 3, LAW)]
)
def test_on_tritons_kernels_too(folder, drafter, width, law):
    """By the interpreter: all verbs of a cycle, warping among them, are the device's."""
    make_triton()  # which mends the interpreter
    own = {"width": width, "kernels": "triton", "prompts": PROMPTS[:1], "max_tokens": 4, "dtype": "float32", "law": law}
    assert said(folder, drafter, 0, **own) == said(folder, drafter, 2, **own)
