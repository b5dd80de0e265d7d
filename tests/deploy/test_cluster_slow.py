"""Simulated servers for minutes: nodes killed one by one, what a second server is worth, how they come and go."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from tests.deploy.cluster import Nodes, Told, ask_all, nodes

REQUESTS = 5000
RATE = 18.0
"""Requests a second: so that it takes nearly five minutes."""
KILL_SECONDS = 60.0


def kill_now_and_then(fleet: Nodes, answers: Future[Told]) -> int:
    """Every minute a node that serves, until all is answered; a fresh one comes in its place -> how many."""
    began = time.monotonic()
    for number in itertools.count():
        if wait([answers], max(0.0, began + (number + 1) * KILL_SECONDS - time.monotonic())).done:
            return number
        serving = sorted(asyncio.run(ask_all(fleet.url, [{"nonce": -1 - i} for i in range(30)], 10)).nodes)
        fleet.add()  # by the main thread: Ray sets a signal
        fleet.kill(random.Random(number).choice(serving))
    raise AssertionError


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_answer_is_lost_or_doubled_while_nodes_are_killed() -> None:
    asks = [{"nonce": i, "pieces": 15 if i % 5 == 0 else 0, "prompt": f"{i % 40} " * 300} for i in range(REQUESTS)]
    with nodes(workers=4) as fleet, ThreadPoolExecutor(1) as beside:
        fleet.deploy(seconds=0.1, slots=16, replicas=3)
        answers = beside.submit(lambda: asyncio.run(ask_all(fleet.url, asks, 32, RATE)))
        killed = kill_now_and_then(fleet, answers)
        told = answers.result()
    print(f"{len(asks)} asked in {told.seconds:.0f} s, {killed} nodes killed, {len(told.broken)} streams broken off")
    assert not told.refused, told.refused
    assert set(told.whole.values()) == {1}
    assert sorted([*told.whole, *told.broken]) == list(range(REQUESTS))
    assert set(told.broken) <= set(range(0, REQUESTS, 5)), "an answer that was no stream was broken off"
    assert set(told.broken.values()) <= {"replica_lost"}
    assert len(told.broken) <= 16 * killed
    assert killed >= 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_servers_do_the_work_of_two() -> None:
    """At saturation, in turns on one cluster; a server answers two at a time, half a second each."""
    with nodes(workers=2) as fleet:
        rates: dict[int, list[float]] = {1: [], 2: []}
        for servers in (1, 2, 1, 2):
            fleet.deploy(seconds=0.5, slots=2, replicas=servers)
            fleet.wait(servers)
            time.sleep(1.0)
            asks = [{"nonce": i} for i in range(40 * servers)]
            told = asyncio.run(ask_all(fleet.url, asks, 10 * servers))
            assert len(told.whole) == len(asks)
            rates[servers].append(len(asks) / told.seconds)
        ratio = sum(rates[2]) / sum(rates[1])
        print(f"answers a second of one and of two servers, in turns: {rates}, ratio {ratio:.3f}")
        assert ratio >= 1.9, rates


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fewer_servers_finish_what_they_have() -> None:
    """All streams end whole though one of their two servers is taken away in the middle."""
    with nodes(workers=2) as fleet:
        fleet.deploy(seconds=0.05, slots=8, replicas=2)
        fewer = threading.Timer(0.5, fleet.deploy, kwargs={"seconds": 0.05, "slots": 8, "replicas": 1})
        fewer.start()
        asks = [{"nonce": i, "pieces": 50} for i in range(10)]
        told = asyncio.run(ask_all(fleet.url, asks, len(asks)))
        fewer.join()
        assert (len(told.whole), told.broken, told.refused) == (10, {}, {})
        assert len(told.servers) == 2
        fleet.wait(1)


SOON = {"min_replicas": 1, "max_replicas": 3, "upscale_delay": 1.0, "downscale_delay": 3.0}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_servers_come_and_go() -> None:
    """By the queue; and by the goodput alone, where the queue would be short enough for one server."""
    with nodes(workers=3) as fleet:
        fleet.deploy(seconds=0.5, slots=4, **SOON)
        told = asyncio.run(ask_all(fleet.url, [{"nonce": i} for i in range(400)], 24))
        assert set(told.whole.values()) == {1}
        assert len(told.whole) == 400
        assert len(told.servers) == 3
        fleet.wait(1)
        fleet.deploy(seconds=0.5, slots=2, goal=1.2, target_requests=16, **SOON)
        told = asyncio.run(ask_all(fleet.url, [{"nonce": i} for i in range(240)], 8))
        assert len(told.whole) == 240
        assert len(told.servers) >= 2
