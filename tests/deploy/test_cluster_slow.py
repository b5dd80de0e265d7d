"""Simulated servers under load for minutes: nodes killed one after the other, and what a second server is worth."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from tests.deploy.cluster import Nodes, ask_all, nodes

REQUESTS = 5000
RATE = 20.0
"""Requests a second: so that it takes a little over four minutes."""
KILL_SECONDS = 60.0


def kill_now_and_then(fleet: Nodes, over: threading.Event, killed: list[str]) -> None:
    """Every minute a node that serves, after a fresh one has come in its place."""
    while not over.wait(KILL_SECONDS):
        serving = sorted(asyncio.run(ask_all(fleet.url, [{"nonce": -i - 1} for i in range(30)], 10)).nodes)
        fleet.add()
        victim = random.Random(len(killed)).choice(serving)
        fleet.kill(victim)
        killed.append(victim)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_answer_is_lost_or_doubled_while_nodes_are_killed() -> None:
    with nodes(workers=4) as fleet:
        fleet.deploy(seconds=0.1, slots=16, replicas=3)
        over, killed = threading.Event(), []
        killer = threading.Thread(target=kill_now_and_then, args=(fleet, over, killed))
        killer.start()
        asks = [{"nonce": i, "pieces": 15 if i % 5 == 0 else 0, "prompt": f"{i % 40} " * 300} for i in range(REQUESTS)]
        try:
            told = asyncio.run(ask_all(fleet.url, asks, 32, RATE))
        finally:
            over.set()
            killer.join()
        assert len(killed) >= 4
        assert not told.refused, told.refused
        assert set(told.whole.values()) == {1}
        assert sorted([*told.whole, *told.broken]) == list(range(REQUESTS))
        assert set(told.broken) <= set(range(0, REQUESTS, 5)), "an answer that was no stream was broken off"
        assert set(told.broken.values()) <= {"replica_lost"}
        assert len(told.broken) <= 16 * len(killed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_servers_do_the_work_of_two() -> None:
    """At saturation, in turns on one cluster; a server answers two at a time, a tenth of a second each."""
    with nodes(workers=2) as fleet:
        rates: dict[int, list[float]] = {1: [], 2: []}
        for servers in (1, 2, 1, 2):
            fleet.deploy(seconds=0.1, slots=2, replicas=servers)
            fleet.wait(servers)
            time.sleep(1.0)
            asks = [{"nonce": i} for i in range(150 * servers)]
            told = asyncio.run(ask_all(fleet.url, asks, 10 * servers))
            assert len(told.whole) == len(asks)
            rates[servers].append(len(asks) / told.seconds)
        ratio = sum(rates[2]) / sum(rates[1])
        assert ratio >= 1.9, rates


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_come_and_go_with_the_queue() -> None:
    with nodes(workers=3) as fleet:
        fleet.deploy(seconds=0.5, slots=4, min_replicas=1, max_replicas=3, upscale_delay=1.0, downscale_delay=3.0)
        told = asyncio.run(ask_all(fleet.url, [{"nonce": i} for i in range(400)], 24))
        assert set(told.whole.values()) == {1}
        assert len(told.whole) == 400
        assert len(told.servers) == 3
        fleet.wait(1)
