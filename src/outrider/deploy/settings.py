"""What can be set of a deployment: how many servers stand behind one address, and when there are more or fewer."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import refuse_less
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """Everything that shapes a deployment, beside its servers.

    Attributes:
        replicas: servers, always so many (None: as many as needed, between the next two).
        min_replicas, max_replicas: fewest and most servers (most: None for as many as fewest).
        target_requests: requests that a server should have at once, running or waiting (None: max_requests).
        good_share: share of the samples that must be good (`--good-first-token`, `--good-token`); below it there are
            more servers.
        upscale_delay, downscale_delay: seconds for which more or fewer must be wanted before there are.
        retries: how often a request is asked anew where its server was lost before it had said anything.
        patience: most seconds that a request waits for a server to be there.
        cpus, gpus: of each server (gpus: None for one where the cluster has any).
        ray_address: of a running Ray cluster, "local" for a new one (None: the one on this machine, or a new one).
    """

    replicas: int | None = None
    min_replicas: int = 1
    max_replicas: int | None = None
    target_requests: int | None = None
    good_share: float = 0.9
    upscale_delay: float = 10.0
    downscale_delay: float = 120.0
    retries: int = 2
    patience: float = 60.0
    cpus: float = 1.0
    gpus: float | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        refuse_less(
            self,
            "a number",
            replicas=1,
            min_replicas=1,
            max_replicas=1,
            target_requests=1,
            upscale_delay=0,
            downscale_delay=0,
            retries=0,
            cpus=0,
            gpus=0,
        )
        if not self.patience > 0:
            raise ConfigError(f"patience={self.patience!r} is out of range: give seconds above 0")
        if not 0 < self.good_share <= 1:
            raise ConfigError(f"good_share={self.good_share!r} is out of range: give a share above 0 and up to 1")
        if self.replicas is not None and (self.min_replicas != 1 or self.max_replicas is not None):
            raise ConfigError("replicas and min_replicas or max_replicas contradict: give a number, or its bounds")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas={self.max_replicas} is below min_replicas={self.min_replicas}: raise it or lower that"
            )

    @property
    def fewest(self) -> int:
        return self.replicas or self.min_replicas

    @property
    def most(self) -> int:
        return self.replicas or self.max_replicas or self.min_replicas
