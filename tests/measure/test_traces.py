"""Recorded trees are what the drafter would have guessed, and their replay what the engine would have accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.control.depth import Control
from outrider.errors import ConfigError
from outrider.measure.simulate import ONE_CORE, Plain, Simulation
from outrider.measure.traces import load_traces, record, save_traces
from tests.models.tiny import make_module, make_tokenizer

PROMPTS = [("one", [5, 6, 7]), ("two", [9, 8])]
PARAMS = SamplingParams(temperature=0.0, seed=3, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_module("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def open_tiny(folder: str, drafter: str) -> LLM:
    return LLM(folder, drafter=drafter, kernels="plain", num_slots=1000, threads=1, self_test=False)


def test_a_replay_accepts_what_the_engine_accepted(folder: str, tmp_path: Path) -> None:
    """The drafter is the target itself: its likeliest guess is the next token, so chains of 4 bring 5 tokens each."""
    llm = open_tiny(folder, "small_model")
    traces = record(llm, PROMPTS, PARAMS, faint=0.0)
    (plain,) = llm.generate([PROMPTS[0][1]], PARAMS)
    assert traces[0].output == tuple(plain.token_ids)
    for trace in traces:
        for position, nodes in trace.moments.items():
            assert nodes[0][:2] == (trace.output[position], -1)
    save_traces(tmp_path / "traces.gz", traces)
    read = load_traces(tmp_path / "traces.gz")
    assert [trace.output for trace in read] == [trace.output for trace in traces]
    fixed = Control(ONE_CORE.cost, 4, 1, 4, adaptive=False, ranks=True)
    simulation = Simulation(ONE_CORE, fixed)
    simulation.drafter = simulation.model  # lookups would guess as well
    assert [told.cycles for told in simulation.run(read)] == [5, 5]  # 23 tokens after prefill's
    assert [told.cycles for told in Simulation(ONE_CORE, Plain()).run(read)] == [23, 23]


def test_a_drafter_that_grows_no_trees_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="ranks its guesses"):
        record(open_tiny(folder, "ngram"), PROMPTS, PARAMS)
