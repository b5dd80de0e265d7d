"""The policy in a simulated world: it guesses where that pays, and leaves off where it does not."""

from __future__ import annotations

import random

import pytest

from outrider.control.acceptance import Acceptance
from outrider.control.cost import PassCost
from outrider.control.depth import Control
from outrider.record import Record, RequestCycle
from outrider.request import Request, SamplingParams

FLAT = {1: 10e-3, 2: 10.2e-3, 4: 10.5e-3, 8: 11e-3, 16: 13e-3, 32: 20e-3, 64: 36e-3}
STEEP = {1: 5e-3, 2: 9e-3, 4: 17e-3, 8: 33e-3, 16: 65e-3, 32: 129e-3, 64: 257e-3}


def simulate(table: dict[int, float], rate: float, draft_level: float, cycles: int = 400, count: int = 1) -> float:
    """Tokens per second over those of plain decoding, in a world where each level holds with chance `rate`."""
    rng = random.Random(5)
    control = Control(PassCost(table), depth=None, width=1)
    truth = PassCost(table)
    requests = [Request(i, (1,), SamplingParams(), 0, limit=10**6) for i in range(count)]
    tokens = seconds = 0.0
    for _ in range(cycles):
        budgets = control.budget(requests)
        rows, done, deepest = 0, [], 0
        for request in requests:
            depth = budgets[request.id].depth if request.id in budgets else 0
            accepted = 0
            while accepted < depth and rng.random() < rate:
                accepted += 1
            rows += 1 + depth
            deepest = max(deepest, depth)
            tokens += 1 + accepted
            done.append(RequestCycle(request.id, depth, depth, 1 + accepted))
        verify, draft = truth.seconds(rows), deepest * draft_level
        seconds += verify + draft
        control.learn(Record(rows, 0, tuple(done), draft, verify, 0.0, draft + verify))
    return (tokens / seconds) / (count / truth.seconds(count))


def test_what_a_cycle_takes_is_told_from_what_was_known_before_it() -> None:
    """By hand: a pass of one row, and 3 ms around it; then of three rows, and 2 ms of guessing."""
    control = Control(PassCost(FLAT), depth=None, width=1)
    plain, guess = RequestCycle(0, 0, 0, 1), RequestCycle(0, 2, 2, 1, asked=True)
    first = control.learn(Record(1, 0, (plain,), 1e-3, 10e-3, 2e-3, 13e-3))
    assert first.seconds_expected == pytest.approx(10e-3)
    assert control.learn(Record(1, 0, (plain,), 1e-3, 10e-3, 2e-3, 13e-3)).seconds_expected == pytest.approx(13e-3)
    assert control.learn(Record(3, 0, (guess,), 3e-3, 10.35e-3, 2e-3, 0.1)).seconds_expected == pytest.approx(13.35e-3)
    assert control.learn(Record(3, 0, (guess,), 3e-3, 10.35e-3, 2e-3, 0.1)).seconds_expected == pytest.approx(15.35e-3)
    for record in (Record(9, 8, (plain,), 0, 0.1, 0, 0.1), Record(8, 8, (), 0, 0.1, 0, 0.1)):
        assert control.learn(record).seconds_expected is None
    in_flight = Record(1, 0, (plain,), 0, 0, 0, 14e-3, overlaps=True)  # of which nobody knows the parts
    assert [control.learn(in_flight).seconds_expected for _ in range(2)] == pytest.approx([10e-3, 14e-3], rel=0.01)


def test_a_plain_pass_behind_guesses_is_no_price_of_plain_decoding() -> None:
    """It takes twice as long here, every time: that is the price of coming back, and so of a guess that is alone."""
    control = Control(PassCost(FLAT), depth=None, width=1)
    plain, guess = RequestCycle(0, 0, 0, 1), RequestCycle(0, 1, 1, 1, asked=True)
    for _ in range(100):
        control.learn(Record(2, 0, (guess,), 1e-3, 10.2e-3, 0, 12e-3))
        behind = control.learn(Record(1, 0, (plain,), 0, 20e-3, 0, 20e-3))
    assert control.cost.seconds(1) == pytest.approx(10e-3)
    assert control.prices.around.returning == pytest.approx(10e-3, rel=0.01)
    assert behind.seconds_expected == pytest.approx(20e-3, rel=0.01)
    settled = control.learn(Record(1, 0, (plain,), 0, 20e-3, 0, 20e-3))
    assert settled.seconds_expected == pytest.approx(10e-3)
    assert control.cost.seconds(1) > 10.1e-3


def test_now_and_then_two_cycles_in_a_row_are_plain() -> None:
    control = Control(PassCost(FLAT), depth=4, width=1)
    request = Request(0, (1,), SamplingParams(), 0, limit=10**6)
    silent = []
    for number in range(192):
        if not control.budget([request]):
            silent.append(number)
        control.learn(Record(5, 0, (RequestCycle(0, 4, 4, 5),), 0, 10.6e-3, 0, 10.6e-3))
    assert silent == [62, 63, 126, 127, 190, 191]


@pytest.mark.parametrize(
    ("table", "rate", "draft_level", "least"),
    [
        (FLAT, 0.9, 0.0, 4.0),  # the best fixed depth gives 6.5
        (FLAT, 0.8, 0.5e-3, 2.2),
        (FLAT, 0.02, 0.5e-3, 0.97),
        (STEEP, 0.5, 0.0, 0.97),
        (STEEP, 0.05, 1e-3, 0.97),
    ],
)
def test_speed_against_plain(table: dict[int, float], rate: float, draft_level: float, least: float) -> None:
    assert simulate(table, rate, draft_level) >= least


def test_many_requests_share_the_width_that_pays() -> None:
    assert simulate(FLAT, 0.8, 0.0, cycles=100, count=8) >= 1.3
    assert simulate(STEEP, 0.3, 0.0, cycles=100, count=32) >= 0.97


def test_a_text_that_changes_is_found_out() -> None:
    """After a hopeless stretch guessing starts again once the text repeats itself."""
    rng = random.Random(0)
    control = Control(PassCost(FLAT), depth=None, width=1)
    request = Request(0, (1,), SamplingParams(), 0, limit=10**6)
    depths = []
    for cycle in range(300):
        budget = control.budget([request]).get(0)
        depth = budget.depth if budget else 0
        accepted = depth if cycle >= 150 else 0
        depths.append(depth)
        verify = FLAT[1] + depth * 0.2e-3 + rng.random() * 1e-4
        control.learn(Record(1 + depth, 0, (RequestCycle(0, depth, depth, 1 + accepted),), depth * 1e-3, verify, 0, 0))
    assert sum(depths[100:150]) <= 12
    assert sum(depths[250:]) >= 300


def test_grades_are_learned_apart() -> None:
    """Short matches that mostly fail do not spoil long ones that hold; without a match nothing is asked for."""
    control = Control(PassCost(FLAT), depth=None, width=1)
    request = Request(0, (1,), SamplingParams(), 0, limit=10**6)
    for cycle in range(200):
        grade = 2 if cycle % 2 else 16
        budget = control.budget([request], {0: grade}).get(0)
        depth = budget.depth if budget else 0
        accepted = depth if grade == 16 else 0
        done = RequestCycle(0, depth, depth, 1 + accepted, grade)
        control.learn(Record(1 + depth, 0, (done,), 0.0, PassCost(FLAT).seconds(1 + depth), 0, 0))
    assert control.budget([request], {0: 16})[0].depth >= 8
    assert 0 not in control.budget([request], {0: 2})
    assert control.budget([request], {0: 0}) == {}


def test_one_request_may_switch_speculation_off_or_lower_its_depth() -> None:
    control = Control(PassCost(FLAT), depth=6, width=2, adaptive=False)
    off = Request(0, (1,), SamplingParams(speculation=False), 0)
    low = Request(1, (1,), SamplingParams(depth=2), 0)
    assert control.looks([off, low])
    assert not control.looks([off])  # nobody pays for grades that no one reads
    budgets = control.budget([off, low])
    assert 0 not in budgets
    assert (budgets[1].depth, budgets[1].nodes) == (2, 4)


def test_the_table_is_monotone_and_follows_new_measurements() -> None:
    cost = PassCost({1: 2.0, 2: 1.0, 8: 4.0})
    seconds = [cost.seconds(rows) for rows in range(1, 20)]
    assert seconds == sorted(seconds)
    assert cost.seconds(16) == pytest.approx(8.0)
    for _ in range(200):
        cost.learn_pass(8, 6.0)
    assert cost.seconds(8) == pytest.approx(6.0, rel=0.01)


def test_slow_passes_are_not_measured_at_every_width() -> None:
    now = 0.0

    def run(width: int, context: int) -> float:
        nonlocal now
        now += 0.1 * width
        return 0.1 * width

    cost = PassCost.measure(run, clock=lambda: now)
    assert list(cost.table()) == [1, 2, 4]
    assert cost.seconds(64) == pytest.approx(6.4)
    assert now < 3.0


def test_rates_lie_between_zero_and_one() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.learn(0, 4, 4)
        acceptance.learn(1, 4, 0)
        assert 0 < acceptance.rate(1) < acceptance.rate(2) < acceptance.rate(0) < 1


def test_a_cheap_guess_is_not_priced_like_a_dear_one() -> None:
    """A cascade: graded guesses cost nothing, the others half a pass a level; each is told its own price."""
    control = Control(PassCost(FLAT), depth=8, width=1, ranks=True)
    requests = {i: Request(i, (1,), SamplingParams(), 0, limit=10**6) for i in range(2)}
    for _ in range(100):
        for number, seconds in ((0, 1e-6), (1, 20e-3)):
            grade = 16 if number == 0 else None
            done = RequestCycle(number, 4, 4, 5 if number == 0 else 2, grade, asked=True)
            control.learn(Record(5, 0, (done,), seconds, PassCost(FLAT).seconds(5), 0, 0))
    cheap = control.budget([requests[0]], {0: 16})[0]
    assert cheap.level_price < 1e-3
    assert cheap.depth >= 4
    assert control.budget([requests[1]], {1: None}) == {}
    dear = control.budget(list(requests.values()), {0: 16, 1: None})
    assert 0 in dear
    assert 1 not in dear


def test_guesses_that_come_back_empty_count_as_guesses() -> None:
    """They cost their drafting: asked for in vain again and again, a drafter is left alone."""
    control = Control(PassCost(FLAT), depth=8, width=1, ranks=True)
    request = Request(0, (1,), SamplingParams(), 0, limit=10**6)
    asked = []
    for _ in range(300):
        wanted = 0 in control.budget([request])
        asked.append(wanted)
        done = RequestCycle(0, 0, 0, 1, asked=wanted)
        control.learn(Record(1, 0, (done,), 1e-3 * wanted, FLAT[1], 0, 0))
    assert sum(asked[:10]) >= 5
    assert sum(asked[100:]) <= 40


def test_cold_first_guesses_do_not_price_a_drafter() -> None:
    """The first guess of a request comes after a whole prompt, the first of all in cold code: neither is a price."""
    control = Control(PassCost(FLAT), depth=8, width=1, ranks=True)
    price = control.prices.drafting[False]

    def guess(request: Request, seconds: float) -> None:
        control.budget([request])
        control.learn(Record(5, 0, (RequestCycle(request.id, 4, 4, 3, asked=True),), seconds, FLAT[4], 0, 0))

    first, second = (Request(i, (1,) * 100, SamplingParams(), 0, limit=10**6) for i in range(2))
    for seconds, level in ((80e-3, 0), (9e-3, 9e-3 / 4), (2e-3, 2e-3 / 4), (4e-3, 2e-3 / 4)):
        guess(first, seconds)
        assert price.level == pytest.approx(level)
    known = price.level
    guess(second, 82e-3)
    assert price.level == known
    assert price.catch_up == pytest.approx(0.78e-3, rel=0.05)  # a token of a prompt of 100
    guess(second, 80e-3)
    assert known < price.level < 1.06 * known


def test_what_slows_one_width_slows_all() -> None:
    """A machine that becomes slower does not make wide passes look cheap, though only narrow ones are seen."""
    cost = PassCost(STEEP)
    for _ in range(400):
        cost.learn_pass(1, 1.5 * STEEP[1])
    assert cost.seconds(1) == pytest.approx(1.5 * STEEP[1], rel=0.01)
    assert cost.seconds(2) - cost.seconds(1) > STEEP[2] - STEEP[1]


@pytest.mark.parametrize("grade", [None, 1, 4])
@pytest.mark.parametrize(("table", "level"), [(FLAT, 1e-3), (FLAT, 8e-3), (STEEP, 0.3e-3)])
def test_a_useless_drafter_costs_at_most_two_in_a_hundred(
    table: dict[int, float], level: float, grade: int | None
) -> None:
    """Its guesses are never right, and the first one of every request must catch up with a prompt."""
    control, truth = Control(PassCost(table), depth=None, width=4, ranks=True), PassCost(table)
    spent = tokens = 0.0
    for number in range(12):
        request = Request(number, (1,), SamplingParams(), 0, limit=10**6)
        for cycle in range(160):
            budget = control.budget([request], {number: grade}).get(number)
            depth = min(budget.depth, 3) if budget else 0
            draft = depth * level + (2 * level if depth and not cycle else 0.0)
            verify = truth.seconds(1 + depth)
            spent += draft + verify
            tokens += 1
            done = RequestCycle(number, depth, depth, 1, grade, asked=depth > 0)
            control.learn(Record(1 + depth, 0, (done,), draft, verify, 0, 0))
        control.forget(request)
    assert tokens * table[1] / spent >= 0.98


def test_a_cascades_dear_drafter_is_tried_again_while_the_cheap_one_guesses() -> None:
    """What the cheap one does is no reason to leave a dear one alone that failed at first, and is good by now."""
    control = Control(PassCost(FLAT), depth=8, width=1, ranks=True)
    request = Request(0, (1,), SamplingParams(), 0, limit=10**6)
    asked = []
    for cycle in range(600):
        grade = None if cycle % 3 else 4
        budget = control.budget([request], {0: grade}).get(0)
        depth = min(budget.depth, 4) if budget else 0
        accepted = depth if grade or cycle > 200 else 0
        done = RequestCycle(0, depth, depth, 1 + accepted, budget.grade if budget else None, asked=depth > 0)
        level = 1e-5 if grade else 1e-3
        control.learn(Record(1 + depth, 0, (done,), depth * level, PassCost(FLAT).seconds(1 + depth), 0, 0))
        if not grade:
            asked.append(depth > 0)
    assert sum(asked[20:120]) <= 15
    assert sum(asked[-50:]) >= 45


def test_guesses_in_flight_and_in_lockstep_have_prices_of_their_own() -> None:
    """A level that costs a twentieth aloft says nothing of one whose rows the host must warp."""
    control = Control(PassCost(FLAT), depth=4, width=1)
    done = (RequestCycle(0, 4, 4, 2, None, True),)
    aloft = Record(5, 0, done, 0, 0, 0, 10.8e-3, keys=5 * 256, overlaps=True)
    plain = Record(1, 0, (RequestCycle(0, 0, 0, 1),), 0, 0, 0, 10.1e-3, keys=256, overlaps=True)
    for _ in range(50):
        control.learn(plain)
        control.learn(aloft)
    lockstep = Record(5, 0, done, 26e-3, 10.6e-3, 1e-3, 38e-3, keys=5 * 256)
    for _ in range(4):
        control.learn(lockstep)
    prices = control.prices
    prices.flies = True
    assert prices.guesses({False: 4.0}) < 1e-3
    assert 10e-3 < prices.cycle(1) < 10.3e-3
    prices.flies = False
    assert prices.guesses({False: 4.0}) > 20e-3
