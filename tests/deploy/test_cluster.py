"""Simulated servers on a Ray cluster of node processes: where requests go, and a node killed under load."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.deploy.cluster import Nodes, Told, ask_all, nodes

pytestmark = pytest.mark.slow  # starting a cluster takes half a minute; the rules themselves have fast tests beside
CLIENTS = 12


@pytest.fixture(scope="module")
def fleet() -> Iterator[Nodes]:
    with nodes(workers=2) as made:
        made.deploy(seconds=0.05, slots=8, replicas=2)
        yield made


def test_a_conversation_stays_where_it_was_read(fleet: Nodes) -> None:
    async def talk() -> list[set[str]]:
        told = Told()
        texts = [f"{i} says: " + "so it goes, " * 60 for i in range(6)]
        async with httpx.AsyncClient(base_url=fleet.url, timeout=60) as http:

            async def conversation(text: str) -> set[str]:
                return {await told.ask(http, turn, prompt=text * (turn + 1)) for turn in range(4)}

            return [await conversation(text) for text in texts]

    places = asyncio.run(talk())
    assert all(len(servers) == 1 for servers in places), places


def test_load_is_spread_and_figures_are_pooled(fleet: Nodes) -> None:
    told = asyncio.run(ask_all(fleet.url, [{"nonce": i} for i in range(60)], CLIENTS))
    assert set(told.whole.values()) == {1}
    assert len(told.whole) == 60
    assert len(told.servers) == 2
    assert min(told.servers.values()) >= 20
    time.sleep(1.1)  # or the figures are those of a moment ago
    text = httpx.get(f"{fleet.url}/metrics").text
    (pooled,) = (float(line.split()[-1]) for line in text.splitlines() if line.startswith("outrider_generation_tok"))
    apart = httpx.get(f"{fleet.url}/metrics/replicas").text
    each = {line.split()[0]: float(line.split()[-1]) for line in apart.splitlines() if line.startswith("outrider_gen")}
    assert len(each) == 2
    assert pooled == sum(each.values()) >= 60
    assert "outrider_deploy_replicas 2.0" in text


def test_a_node_is_killed_under_load(fleet: Nodes) -> None:
    """Whoever had heard nothing is answered all the same, once; streams of its server end with an error."""
    served_by = asyncio.run(ask_all(fleet.url, [{"nonce": i} for i in range(20)], CLIENTS)).nodes
    killed = threading.Timer(0.5, fleet.kill, args=[min(served_by)])
    killed.start()
    kinds = ({"pieces": 40}, {"seconds": 1.5}, {}, {})
    asks = [{"nonce": i, **kinds[i % 4]} for i in range(48)]
    told = asyncio.run(ask_all(fleet.url, asks, CLIENTS))
    killed.join()
    assert not told.refused, told.refused
    assert set(told.whole.values()) == {1}
    assert sorted([*told.whole, *told.broken]) == list(range(48))
    assert told.broken
    assert set(told.broken) <= set(range(0, 48, 4))
    text = httpx.get(f"{fleet.url}/metrics").text
    (retried,) = re.findall(r"^outrider_deploy_requests_retried_total (\S+)", text, re.MULTILINE)
    assert float(retried) >= 1
    assert set(told.broken.values()) <= {"replica_lost"}
    fleet.wait(1)
