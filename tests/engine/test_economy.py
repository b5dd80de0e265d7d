"""The estimated speed-up: recomputed by hand from records, its bounds as doubt shrinks, and as an engine adds it up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outrider import LLM, SamplingParams
from outrider.engine.economy import DOUBT, DOUBT_REST, Economy
from outrider.record import Record, RequestCycle, Saving, Tally
from tests.models.tiny import make_module, make_tokenizer

PRICES = {1: 4.0, 2: 4.5, 3: 5.0, 4: 5.5, 5: 6.0, 12: 9.0}


def plain(verify: float = 4.0, rest: float = 0.5) -> Record:
    return Record(1, 0, (RequestCycle(7, 0, 0, 1),), 0.1, verify, 0.3, verify + rest)


def guessed(delivered: int, **own: float) -> Record:
    seconds = {"seconds_draft": 1.0, "seconds_verify": 6.5, "seconds_sample": 0.7, "seconds_total": 8.3, **own}
    return Record(5, 0, (RequestCycle(7, 4, 4, delivered, asked=True),), **seconds)


def test_a_cycle_is_priced_by_hand():
    """Its pass of 6.5 s less four guessed rows (6 - 4), and two more plain passes of 4 s; 0.5 s beside each pass."""
    economy, tallies = Economy(PRICES.__getitem__), {7: Tally()}
    assert economy.settle(plain(), tallies).speed_up.ratio == 1
    saving = economy.settle(guessed(3), tallies)
    assert saving.plain == pytest.approx(6.5 - 2 + 0.5 + 2 * (4 + 0.5))
    assert saving.spent == 8.3
    assert tallies[7].saving.plain == pytest.approx(4.5 + 14.0)
    assert tallies[7].saving.spent == pytest.approx(4.5 + 8.3)


def test_where_no_plain_cycle_was_seen_drawing_and_books_are_this_passs_own():
    saving = Economy(PRICES.__getitem__).settle(guessed(3), {7: Tally()})
    assert saving.plain == pytest.approx(6.5 - 2 + 0.7 + 2 * (4 + 0.7))


def test_a_guess_that_came_to_nothing_costs_what_it_took():
    economy, tallies = Economy(PRICES.__getitem__), {7: Tally()}
    economy.settle(plain(), tallies)
    record = Record(1, 0, (RequestCycle(7, 0, 0, 1, asked=True),), 2.0, 4.2, 0.3, 6.6)
    assert economy.settle(record, tallies).speed_up.ratio == pytest.approx((4.2 + 0.5) / 6.6)


def test_what_only_a_drafter_asks_for_is_no_part_of_plain_decoding():
    """Half a second beside the plain pass, 0.2 of it for grades and looking on: plain decoding takes 4.3 of 4.5 s."""
    economy, tallies = Economy(PRICES.__getitem__), {7: Tally()}
    found = economy.settle(replace(plain(), seconds_books=0.2), tallies)
    assert found.speed_up.ratio == pytest.approx(4.3 / 4.5)
    saving = economy.settle(guessed(3, seconds_books=0.3), tallies)
    assert saving.plain == pytest.approx(6.5 - 2 + 0.3 + 2 * (4 + 0.3))
    first = Economy(PRICES.__getitem__).settle(guessed(3, seconds_books=0.3), {7: Tally()})
    assert first.plain == pytest.approx(6.5 - 2 + 0.4 + 2 * (4 + 0.4))


def test_prompts_in_the_same_pass_are_in_both():
    """12 rows: 7 of a prompt, 1 of each of two requests, 3 guessed; without these, 9 rows at the price of 12 less 5."""
    prices = {**PRICES, 9: 7.5}
    cycles = RequestCycle(7, 3, 3, 4, asked=True), RequestCycle(8, 0, 0, 1)
    record = Record(12, 7, cycles, 1.0, 10.0, 1.0, 12.5)
    tallies = {7: Tally(), 8: Tally()}
    Economy(prices.__getitem__).settle(record, tallies)
    first = 10.0 - (9.0 - 7.5) + 1.0
    assert tallies[7].saving.plain == pytest.approx(first + 3 * (4.5 + 1.0))
    assert tallies[8].saving.speed_up.ratio == pytest.approx(first / 12.5)


def test_in_flight_only_the_whole_is_known():
    economy, tallies = Economy(PRICES.__getitem__), {7: Tally()}
    economy.settle(Record(1, 0, (RequestCycle(7, 0, 0, 1),), 0, 0, 0, 4.2, overlaps=True), tallies)
    record = Record(5, 0, (RequestCycle(7, 4, 4, 3, asked=True),), 0, 0, 0, 7.0, overlaps=True)
    assert economy.settle(record, tallies).plain == pytest.approx(3 * (4 + 0.2))


def test_bounds_tell_the_doubt_about_prices_and_shrink_as_passes_are_seen():
    """Before a pass was seen: 10 % of the wide pass, of the narrow one, and of two further ones, and 30 % of what else
    three plain cycles take; at 1.96 deviations."""
    economy = Economy(PRICES.__getitem__)
    first = economy.settle(guessed(3), {7: Tally()})
    assert first.doubt == pytest.approx(DOUBT * (6 + 4 + 2 * 4) + DOUBT_REST * 3 * 0.7)
    assert first.noise == pytest.approx(2 * (DOUBT * 4) ** 2)
    found = first.speed_up
    around = 1.96 * math.sqrt(first.doubt**2 + first.noise)
    assert (found.low, found.high) == pytest.approx(((first.plain - around) / 8.3, (first.plain + around) / 8.3))
    for _ in range(200):
        economy.settle(plain(), {7: Tally()})
        economy.settle(guessed(3, seconds_verify=6.0), {7: Tally()})
    sure = economy.settle(guessed(3), {7: Tally()}).doubt
    assert sure < first.doubt / 2.5
    for _ in range(400):  # nobody sees a plain pass, so that its price may have drifted
        economy.settle(guessed(3, seconds_verify=6.0), {7: Tally()})
    assert economy.settle(guessed(3), {7: Tally()}).doubt > 1.4 * sure
    for _ in range(200):  # the table is off by a fifth
        economy.settle(plain(4.8), {7: Tally()})
    assert economy.settle(guessed(3), {7: Tally()}).doubt > first.doubt / 2


def test_savings_pool_and_fade():
    one, other = Saving(2.0, 3.0, 0.1, 0.04), Saving(1.0, 1.0, 0.2, 0.01)
    one.add(other)
    assert (one.spent, one.plain, one.doubt, one.noise) == pytest.approx((3.0, 4.0, 0.3, 0.05))
    before = one.speed_up
    one.fade(0.5)
    assert one.speed_up == before
    assert Saving().speed_up is None is Saving().to_json()


def test_an_engine_adds_up_what_its_requests_are_told(tmp_path):
    make_module("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    settings = {"num_slots": 512, "self_test": False, "threads": 1, "depth": 4}
    prompts = [(5, 6, 7, 8, 5, 6, 7), (9, 8, 7, 9, 8, 7, 9)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    llm = LLM(str(tmp_path), drafter="ngram", adaptive=False, **settings)
    results = llm.generate(prompts, params)
    for result in results:
        seconds = result.tally.seconds_total - result.tally.seconds_prefill
        assert result.tally.saving.spent == pytest.approx(seconds)
        told = result.to_json()["speculation"]["speed_up"]
        assert 0 <= told["low"] <= told["ratio"] <= told["high"]
    recent = llm.engine.economy.recent
    assert recent.plain <= sum(result.tally.saving.plain for result in results)
    assert recent.plain == pytest.approx(sum(result.tally.saving.plain for result in results), rel=0.1)
    (alone,) = LLM(str(tmp_path), drafter="none", **settings).generate(prompts[0], params)
    assert alone.to_json()["speculation"]["speed_up"] is None
