"""What a cycle took while a graph was taken is nobody's price: it once made deep trees as cheap as shallow ones."""

from __future__ import annotations

from outrider.control.cost import PassCost
from outrider.control.depth import Control
from outrider.engine.economy import Economy
from outrider.record import Record, RequestCycle, Tally
from tests.control.test_company import CARD

PLAIN, GUESS = RequestCycle(0, 0, 0, 1), RequestCycle(0, 4, 4, 3, asked=True)


def aloft(cycle: RequestCycle, rows: int, seconds: float, captures: bool = False) -> Record:
    return Record(rows, 0, (cycle,), 0, 0, 0, seconds, keys=rows, overlaps=True, captures=captures)


def test_control_learns_what_is_accepted_and_no_price() -> None:
    control = Control(PassCost(CARD), depth=None, width=4, nodes=31)
    before = control.prices.to_json()
    for record in (aloft(PLAIN, 1, 0.3, True), aloft(GUESS, 17, 0.5, True)):
        assert control.learn(record).seconds_expected is None
    assert control.prices.to_json() == before
    assert control.acceptance.rate(0) != Control(PassCost(CARD), None, 4).acceptance.rate(0)
    control.learn(aloft(PLAIN, 1, 5e-3))
    assert 0 < control.prices.aloft.planning < 1e-3


def test_the_estimated_speed_up_does_not_learn_from_it_either() -> None:
    economy = Economy(PassCost(CARD).seconds)
    economy.settle(aloft(PLAIN, 1, 0.3, True), {0: Tally()})
    economy.settle(aloft(PLAIN, 1, 4.5e-3), {0: Tally()})
    saving = economy.settle(aloft(GUESS, 17, 6e-3), {0: Tally()})
    assert saving is not None
    assert saving.plain < 3 * 5e-3
