"""Starts a deployment on a Ray cluster, and stops it when told to."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import ray
from ray import serve

from outrider.deploy.app import application
from outrider.deploy.settings import DeployConfig
from outrider.errors import ConfigError, ModelError
from outrider.server.settings import ServeConfig

NAME = "outrider"
"""The application's name in the cluster."""


@contextmanager
def deployed(model: str, engine: dict[str, Any], config: ServeConfig, deploy: DeployConfig) -> Iterator[str]:
    """A deployment within the block -> its address; at the end requests that run get their time.

    Raises:
        ConfigError: the cluster cannot be reached or has not what the servers need, or the port cannot be had.
        ModelError: the servers did not start.
    """
    with _cluster(deploy) as cluster:
        if deploy.gpus is None:
            wants_gpu = engine.get("device", "auto") != "cpu" and cluster.get("GPU", 0) > 0
            deploy = replace(deploy, gpus=1.0 if wants_gpu else 0.0)
        _fits(deploy, cluster)
        port = config.port or _free_port(config.host)
        app = application(model, engine, config, deploy)
        serve.start(proxy_location="HeadOnly", http_options={"host": config.host, "port": port})
        if NAME in serve.status().applications:
            raise ConfigError("this cluster has a deployment already: end it, or give --ray-address of another cluster")
        try:
            try:
                serve.run(app, name=NAME, route_prefix="/")
            except RuntimeError as error:
                raise ModelError(_reason(str(error))) from error
            shown = f"[{config.host}]" if ":" in config.host else config.host
            yield f"http://{shown}:{port}"
        finally:
            serve.delete(NAME)


def until_told(ready: Callable[[], None]) -> None:
    """Call `ready`, and wait for SIGTERM or Ctrl-C; to be called from the main thread."""
    told = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        told.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ready()
        told.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _cluster(deploy: DeployConfig) -> Iterator[dict[str, float]]:
    """What a cluster has: the one that is named, that of this machine, or one of this process alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody unless its user wants that
    try:
        ray.init(address=deploy.ray_address, include_dashboard=False, configure_logging=False, namespace=NAME)
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"no Ray cluster at {deploy.ray_address!r} ({said}): start one by `ray start`") from error
    try:
        yield ray.cluster_resources()
    finally:
        ray.shutdown()


def _fits(deploy: DeployConfig, cluster: dict[str, float]) -> None:
    for name, each in (("CPU", deploy.cpus), ("GPU", deploy.gpus or 0.0)):
        needed, there = each * deploy.fewest, cluster.get(name, 0.0)
        if needed > there:
            raise ConfigError(
                f"{deploy.fewest} servers of {each:g} {name} need {needed:g}, and the cluster has {there:g}: "
                f"lower --{name.lower()}s or the number of servers, or add nodes"
            )


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        return int(taken.getsockname()[1])


def _reason(said: str) -> str:
    """Of all that Ray tells, our own sentence where there is one."""
    found = re.search(r"outrider\.errors\.\w+: (.+)", said)
    return found[1] if found else f"the servers did not start: {' '.join(said.split())[-300:]}"
