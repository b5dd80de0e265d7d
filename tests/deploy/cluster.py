"""A Ray cluster of several node processes on this machine, and clients that keep count of what they are told."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from outrider.deploy.settings import DeployConfig
from outrider.server.settings import ServeConfig

QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
}
"""A node's loss is noticed soon even where its connections do not tell of it, and no process is started to be idle."""
STORE = 80 * 2**20


@dataclass
class Nodes:
    """A cluster whose first node has no room for servers, so that all others may be killed."""

    cluster: Any
    url: str
    workers: list[Any] = field(default_factory=list)

    def add(self) -> None:
        self.workers.append(self.cluster.add_node(num_cpus=1, object_store_memory=STORE, include_dashboard=False))

    def kill(self, node_id: str) -> None:
        """As if its power were cut: no process of it says goodbye."""
        node = next(worker for worker in self.workers if worker.node_id == node_id)
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def deploy(self, seconds: float, slots: int, goal: float = 60.0, **settings: Any) -> None:
        """Serve simulated servers, and wait until they are there."""
        from ray import serve

        from outrider.deploy.app import fleet
        from tests.deploy.simulated import Simulated

        config, port = ServeConfig(shutdown_grace=10.0), int(self.url.rsplit(":", 1)[1])
        deploy = DeployConfig(**settings)
        app = fleet(functools.partial(Simulated, seconds, slots, goal), config, deploy, max_requests=slots)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(app, name="outrider", route_prefix="/")
        self.wait(deploy.fewest)

    def wait(self, servers: int, seconds: float = 60.0) -> list[str]:
        """Until so many servers answer -> their names."""
        deadline = time.monotonic() + seconds
        while True:
            told = httpx.get(f"{self.url}/health", timeout=30)
            names = [one["replica"] for one in told.json().get("replicas", [])] if told.status_code < 500 else []
            if len(names) == servers:
                return names
            assert time.monotonic() < deadline, f"{servers} servers were awaited: {told.text}"
            time.sleep(0.2)


@contextmanager
def nodes(workers: int) -> Iterator[Nodes]:
    ray = pytest.importorskip("ray", reason='needs "outrider[ray]"')
    from ray import serve
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as taken:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        port = taken.getsockname()[1]
        taken.close()
        head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False, "_system_config": QUICK}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        made = Nodes(cluster, f"http://127.0.0.1:{port}")
        try:
            for _ in range(workers):
                made.add()
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            yield made
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


@dataclass
class Told:
    """What clients were told, by nonce."""

    whole: Counter[int] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    servers: Counter[str] = field(default_factory=Counter)
    nodes: set[str] = field(default_factory=set)
    seconds: float = 0.0

    async def ask(self, http: httpx.AsyncClient, nonce: int, pieces: int = 0, **more: Any) -> str:
        """Ask once -> the server's name."""
        body = {"nonce": nonce, "pieces": pieces, **more}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            text = (await answer.aread()).decode()
            name = answer.headers.get("x-outrider-replica", "")
        if answer.status_code != 200:
            self.refused[nonce] = text
            return name
        self.servers[name] += 1
        if not pieces:
            said = json.loads(text)
            assert said["nonce"] == nonce
            self.nodes.add(said["node"])
            self.whole[nonce] += 1
            return name
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        told = [json.loads(event) for event in events[:-1]]
        assert told == [{"nonce": nonce, "piece": i} for i in range(len(told))], "pieces are missing or came twice"
        if events[-1] == "[DONE]":
            assert len(told) == pieces
            self.whole[nonce] += 1
        else:
            self.broken[nonce] = json.loads(events[-1])["error"]["code"]
        return name


async def ask_all(
    url: str, asks: list[dict[str, Any]], clients: int, rate: float | None = None, told: Told | None = None
) -> Told:
    """Ask them all, by so many clients at a time, at most `rate` a second."""
    told, waiting, began = told or Told(), iter(enumerate(asks)), time.monotonic()

    async def client(http: httpx.AsyncClient) -> None:
        for i, ask in waiting:
            if rate is not None:
                await asyncio.sleep(max(0.0, began + i / rate - time.monotonic()))
            await told.ask(http, **ask)

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    told.seconds = time.monotonic() - began
    return told
