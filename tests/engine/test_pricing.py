"""Prices at start: measured within seconds, kept for the next start, and never a reason not to start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.drafters.base import Ask, Drafter, Workshop
from outrider.engine.pricing import keep_prices, read_prices, time_guesses
from outrider.llm import LLM
from outrider.registry import DRAFTERS
from outrider.request import SamplingParams
from outrider.tree import DraftTree
from tests import toy
from tests.models.tiny import make_module, make_tokenizer


class Broken(Drafter):
    """Fails where it is first asked."""

    name = "broken"

    def __init__(self, workshop: Workshop) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        raise KeyError("nothing")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    make_module("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_guesses_of_several_depths_are_timed_and_leave_nothing_behind() -> None:
    engine = toy.make_engine("small_model", depth=8, adaptive=True)
    held = engine.ledger.pool.num_held
    time_guesses(engine)
    assert engine.scheduler.is_idle
    assert engine.ledger.pool.num_held == held
    (price,) = engine.control.prices.drafting
    assert 0 < price.seconds(1) < price.seconds(8)


def test_prices_of_one_start_serve_the_next(folder: Path) -> None:
    settings = {"kernels": "plain", "num_slots": 1000, "threads": 1, "drafter": "small_model"}
    first = LLM(str(folder), **settings)
    first.generate([[3, 5, 7]], SamplingParams(max_tokens=8, ignore_eos=True, seed=0))
    first.close()
    file = first.engine.prices_file
    assert file is not None
    assert file.parent == folder.parent / "cache" / "prices"
    kept = read_prices(file)
    assert kept is not None
    second = LLM(str(folder), **settings)
    assert second.engine.prices_file == file
    other = LLM(str(folder), **{**settings, "drafter": "none"})
    assert other.engine.prices_file != file


def test_a_file_that_is_no_prices_is_none(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    assert read_prices(file) is None
    for text in ("", "[]", '{"pass": {"rows": [1]}}', '{"pass": {}, "drafting": []}'):
        file.write_text(text)
        assert read_prices(file) is None
    prices = toy.make_engine("ngram").control.prices
    keep_prices(file, prices)
    assert read_prices(file) == prices.to_json()
    keep_prices(file / "no folder", prices)  # says nothing: the next start measures anew


def test_a_drafter_that_fails_while_it_is_timed_is_told_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS._entries, "broken", f"{__name__}:Broken")
    monkeypatch.setattr("outrider.engine.step.Engine.strict", False)
    llm = LLM(str(folder), drafter="broken", kernels="plain", num_slots=1000, threads=1)
    assert llm.engine.drafter is None
    (result,) = llm.generate([[3, 5, 7]], SamplingParams(max_tokens=4, ignore_eos=True, seed=0))
    assert result.completion_tokens == 4
