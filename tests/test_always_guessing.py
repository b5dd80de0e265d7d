"""Where every cycle must guess, the guesses have the shape that was asked for, and else a usual one."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from tests.models.tiny import make_module, make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    make_module("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(("settings", "levels"), [({}, 4), ({"depth": 6}, 4), ({"depth": 6, "adaptive": False}, 6)])
def test_a_shape_that_control_may_not_change_is_kept(folder, settings, levels):
    llm = LLM(folder, drafter="early_exit", kernels="plain", num_slots=1000, threads=1, self_test=False, **settings)
    cycles = []
    with llm.always_guessing():
        asks = iter([(0, [3, 4, 5], SamplingParams(max_tokens=40, ignore_eos=True))])
        step = llm.engine.step

        def watched():
            emissions, record = step()
            cycles.extend(cycle for cycle in record.cycles if cycle.asked)
            return emissions, record

        llm.engine.step = watched
        list(llm.generate_from(lambda: next(asks, None)))
    assert max(cycle.depth for cycle in cycles) == levels
