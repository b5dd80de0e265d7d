"""Prices outlive an engine, are taken over where the machine still keeps them, and never get in the way."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.control.cost import PassCost
from outrider.control.prices import Prices
from outrider.engine import kept_prices
from outrider.record import Record, RequestCycle
from tests.server.tiny_chat import save_tiny_chat

TABLE = {1: 4e-3, 2: 4.5e-3, 8: 9e-3, 64: 50e-3}


def learnt() -> Prices:
    prices = Prices(PassCost(TABLE, 1e-6, 5e-7))
    for levels in range(1, 9):
        done = (RequestCycle(0, levels, levels, 1, None, True),)
        prices.learn(Record(1 + levels, 0, done, 1e-3 * levels, 5e-3, 1e-4, 7e-3, keys=300), {False: levels}, 0)
        prices.learn(Record(1, 0, (RequestCycle(0, 0, 0, 1),), 1e-4, 4e-3, 1e-4, 5e-3, keys=300), {}, 0)
    return prices


def test_prices_return_from_text_as_they_were_and_scale_with_the_machine() -> None:
    prices = learnt()
    again = Prices.of_json(json.loads(json.dumps(prices.to_json())))
    assert again.to_json() == prices.to_json()
    before = [again.rows(rows) for rows in (1, 3, 40)] + [again.guesses({False: 3.0}), again.token]
    again.scale(2.0)
    after = [again.rows(rows) for rows in (1, 3, 40)] + [again.guesses({False: 3.0}), again.token]
    assert after == pytest.approx([2 * each for each in before])


@pytest.mark.parametrize(("factors", "confirmed"), [((1.0, 1.0), 1.0), ((3.0, 3.0), 3.0), ((1.0, 1.6), None)])
def test_a_machine_that_changed_is_measured_anew(factors: tuple[float, float], confirmed: float | None) -> None:
    def run(width: int, context: int) -> float:
        return TABLE[width] * factors[width > 1]

    found = PassCost(TABLE).confirmed(run)
    assert found == (None if confirmed is None else pytest.approx(confirmed))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_prices, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(kept_prices, "ENOUGH", 5)
    return tmp_path / "prices"


def opened(folder: str) -> LLM:
    return LLM(folder, drafter="ngram", kernels="plain", num_slots=1024, threads=1, self_test=False)


def use(folder: str) -> dict[str, float]:
    """Run an engine and let it go; what it learnt of its drafter."""
    llm = opened(folder)
    llm.generate("one two one two", SamplingParams(max_tokens=12))
    drafting = llm.engine.control.prices.drafting[True].to_json()
    del llm
    gc.collect()  # an engine and its parts know each other
    return drafting


def test_an_engine_leaves_its_prices_and_the_next_one_begins_with_them(cache: Path, tmp_path: Path) -> None:
    folder = save_tiny_chat(tmp_path / "model")
    drafting = use(folder)
    (kept,) = cache.glob("*.json")
    told = json.loads(kept.read_text())
    assert told["prices"]["lockstep"]["drafting"]["graded"] == drafting
    assert told["of"]["drafter"][0] == "ngram"
    llm = opened(folder)
    assert llm.engine.control.prices.drafting[True]._num_seen in (0, drafting["num_seen"])  # measured anew, or not
    del llm
    gc.collect()  # it learnt too little to be kept
    assert json.loads(kept.read_text()) == told
    for broken in ("", "{}", "[1]", '{"prices": {"passes": {"rows": {"1": -1}}}}', told_with_nan(told)):
        kept.write_text(broken)
        use(folder)
    assert json.loads(kept.read_text())["of"] == told["of"]


def told_with_nan(told: dict) -> str:
    return json.dumps(told).replace('"catch_up": 0.0', '"catch_up": NaN')


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(kept_prices, "cache_folder", lambda: tmp_path / "file")
    monkeypatch.setattr(kept_prices, "ENOUGH", 1)
    use(save_tiny_chat(tmp_path / "model"))
    assert (tmp_path / "file").read_text() == ""
