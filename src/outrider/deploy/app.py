"""The application of Ray Serve: a door, and the servers behind it; importable as `outrider.deploy.app:build`."""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.types import Message, Receive, Scope, Send

from outrider.config import EngineConfig
from outrider.deploy.door import Door
from outrider.deploy.fleet import Fleet
from outrider.deploy.replica import LAST_WORDS, Hosted, HostedServer, Replica
from outrider.deploy.settings import DeployConfig
from outrider.errors import ConfigError
from outrider.registry import unknown
from outrider.server.logs import tell_all
from outrider.server.settings import ServeConfig

MOST_OPEN = 4096
"""Requests that the door hands on at once; more wait in Ray's proxy."""
HEAD = {"node:__internal_head__": 0.001}
"""The door stands beside Ray's controller and proxy: one machine fewer whose loss loses requests."""


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """The application for `serve run outrider.deploy.app:build model=... ` and for Ray's configuration files.

    Args:
        arguments: `model` and any setting of the engine, the servers and the deployment, by the name it has in
            EngineConfig, ServeConfig or DeployConfig.

    Raises:
        ConfigError: a setting is unknown, contradictory or out of range.
    """
    given = dict(arguments)
    model = given.pop("model", None)
    if not isinstance(model, str):
        raise ConfigError("a deployment needs a model: give model=NAME")
    kinds = (EngineConfig, ServeConfig, DeployConfig)
    problem = unknown("setting", given, [f.name for kind in kinds for f in fields(kind) if f.name != "model"])
    if problem:
        raise ConfigError(problem)
    engine, server, deploy = ({n: _typed(kind, n, given[n]) for n in _named(kind) if n in given} for kind in kinds)
    return application(model, engine, ServeConfig(**server), DeployConfig(**deploy))


def application(model: str, engine: dict[str, Any], config: ServeConfig, deploy: DeployConfig) -> serve.Application:
    """Servers of a model behind one door.

    Args:
        engine: keywords of EngineConfig, without the model.

    Raises:
        ConfigError: for a setting that is unknown or out of range, or a file of keys that cannot be read.
    """
    if deploy.cpus >= 1:
        engine = {"threads": int(deploy.cpus), **engine}  # or each server would take all the machine has
    model = _whole(model)
    if engine.get("drafter_model"):
        engine = {**engine, "drafter_model": _whole(engine["drafter_model"])}
    settled = EngineConfig.of(model=model, **engine)
    if settled.tensor_parallel > 1:
        raise ConfigError("a replica has one device: leave tensor_parallel out, or run `outrider serve` under torchrun")
    config.keys()
    if config.api_key_file is not None:
        config = replace(config, api_key_file=_whole(config.api_key_file))
    make = functools.partial(HostedServer, model, engine, config)
    return fleet(make, config, deploy, settled.max_requests)


def fleet(
    make: Callable[[], Hosted], config: ServeConfig, deploy: DeployConfig, max_requests: int
) -> serve.Application:
    """Servers of any kind behind one door.

    Args:
        make: opens a server, where it is to run. max_requests: that it runs at once.
    """
    replica = serve.deployment(Replica).options(
        name="replica",
        max_ongoing_requests=max_requests + config.max_queue,
        max_queued_requests=max(1, config.max_queue),
        ray_actor_options={"num_cpus": deploy.cpus, "num_gpus": deploy.gpus or 0},
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=config.shutdown_grace + LAST_WORDS,
        request_router_config=RequestRouterConfig(request_router_class="outrider.deploy.router:PrefixRouter"),
        **_number(deploy, max_requests),
    )
    door = serve.deployment(serve.ingress(Entrance())(Ingress)).options(
        name="door",
        num_replicas=1,
        max_ongoing_requests=MOST_OPEN,
        ray_actor_options={"num_cpus": 0, "resources": HEAD},
        graceful_shutdown_timeout_s=config.shutdown_grace + 2 * LAST_WORDS,
    )
    return door.bind(replica.bind(make, replica_name), config, deploy)


def _number(deploy: DeployConfig, max_requests: int) -> dict[str, Any]:
    """How many servers there are, or between how many and by what."""
    if deploy.fewest == deploy.most:
        return {"num_replicas": deploy.fewest}
    target = deploy.target_requests or max_requests
    policy = AutoscalingPolicy(
        policy_function="outrider.deploy.policy:Autoscale",
        policy_kwargs={"target": target, "share": deploy.good_share},
    )
    scaling = AutoscalingConfig(
        min_replicas=deploy.fewest,
        max_replicas=deploy.most,
        target_ongoing_requests=target,
        upscale_delay_s=deploy.upscale_delay,
        downscale_delay_s=deploy.downscale_delay,
        metrics_interval_s=2.0,
        look_back_period_s=5.0,
        policy=policy,
    )
    return {"autoscaling_config": scaling}


def replica_name() -> str:
    """What Ray Serve calls the replica that this process is."""
    return str(serve.get_replica_context().replica_id.unique_id)


class Ingress:
    """The class of the deployment of the door."""

    def __init__(self, replicas: Any, config: ServeConfig, deploy: DeployConfig) -> None:
        tell_all()
        self.door = Door(Fleet(replicas, deploy.patience), config, deploy.retries)


class Entrance:
    """The ASGI application that Ray Serve calls; the door is the replica's own, as it holds a handle."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return

        async def once(message: Message) -> None:
            """Ray's proxy tells the request's id by itself."""
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await serve.get_replica_context().servable_object.door(scope, receive, once)


def _whole(path: str) -> str:
    """A file or folder by its whole name, as servers start elsewhere; anything else stays."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def _named(kind: type) -> list[str]:
    return [f.name for f in fields(kind) if f.name != "model"]


def _typed(kind: type, name: str, value: Any) -> Any:
    """A setting from a command line, where all is text; one from a file has its type."""
    if not isinstance(value, str) or "str" in str(typing.get_type_hints(kind)[name]):
        return value
    try:
        return json.loads(value.lower())
    except ValueError as error:
        raise ConfigError(f"{name}={value!r} is no number and no true or false: give one") from error
