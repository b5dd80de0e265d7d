"""How many servers are wanted, in simulated time."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from outrider.deploy.policy import PERIOD, Autoscale, Bearing, Seen, look, wanted
from outrider.server.goodput import WINDOW


def test_by_the_queue():
    bearing = Bearing(limit=8.0, due=0.0)
    assert wanted(Seen(1, 24, 0, 0, 0), bearing) == 3
    assert wanted(Seen(3, 4, 0, 0, 0), bearing) == 0.5


def test_late_answers_lower_what_a_server_may_have():
    late = Seen(servers=2, requests=12, good=3, ended=5, now=PERIOD)
    after = look(late, Bearing(16.0, 0.0), target=16, share=0.9)
    assert after.limit < 6  # below what each has now, so that there must be more of them
    assert wanted(late, after) > 2
    assert after.due == PERIOD + WINDOW
    assert look(Seen(3, 12, 0, 5, PERIOD + WINDOW - 1), after, 16, 0.9) == after  # what was seen then is still in it


def test_good_answers_raise_it_again_where_it_is_tried():
    good = Seen(servers=2, requests=8, good=5, ended=5, now=PERIOD)
    assert look(good, Bearing(4.0, 0.0), 16, 0.9).limit > 4
    assert look(good, Bearing(15.9, 0.0), 16, 0.9).limit == 15.9  # four each tell nothing of sixteen
    assert look(Seen(1, 16, 5, 5, PERIOD), Bearing(15.9, 0.0), 16, 0.9).limit == 16


@pytest.mark.parametrize("seen", [Seen(2, 2, 0, 5, PERIOD), Seen(0, 9, 0, 5, PERIOD), Seen(2, 9, 0, 0, PERIOD)])
def test_what_more_servers_would_not_mend_changes_nothing(seen: Seen):
    """One request each, none at all, or nothing that ended."""
    assert look(seen, Bearing(4.0, 0.0), 16, 0.9).limit == 4.0


def test_a_fleet_finds_the_size_at_which_answers_are_in_time():
    """Servers that are in time with up to five requests each, 30 requests at a time: about six servers."""
    servers, bearing, sizes = 1, Bearing(64.0, 0.0), []
    for step in range(1, 60):
        each = 30 / servers
        seen = Seen(servers, 30, 10.0 if each <= 5 else 5.0, 10.0, step * WINDOW)
        bearing = look(seen, bearing, target=64, share=0.9)
        servers = min(20, max(1, math.ceil(wanted(seen, bearing))))
        sizes.append(servers)
    assert sizes[0] == 2
    assert max(sizes) <= 9
    assert all(5 <= size <= 9 for size in sizes[10:]), sizes


def test_rays_door():
    def context(state, good, ended, now):
        return SimpleNamespace(
            policy_state=state,
            aggregated_metrics={"good": {"a": good, "b": good}, "ended": {"a": ended, "b": ended}},
            current_num_replicas=2,
            total_num_requests=12,
            current_time=now,
        )

    autoscale = Autoscale(target=16, share=0.9)
    number, state = autoscale(context({}, 1.0, 3.0, 100.0))
    assert number == 12 / 16
    number, state = autoscale(context(state, 1.0, 3.0, 100.0 + PERIOD))
    assert number > 2
    assert autoscale(context(state, 3.0, 3.0, 101.0 + PERIOD))[0] == number
