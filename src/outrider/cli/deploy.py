"""`outrider deploy`: several servers behind one address, on Ray Serve."""

from __future__ import annotations

import logging

from outrider.cli.options import Model, Settings, takes
from outrider.cli.session import fetch_if_missing, logs
from outrider.config import EngineConfig
from outrider.deploy.settings import DeployConfig
from outrider.errors import ConfigError
from outrider.server.settings import ServeConfig


@takes(EngineConfig, ServeConfig, DeployConfig)
def deploy(model: Model, *, settings: Settings) -> None:
    """Serve a model by several servers behind one address, on this machine or a Ray cluster.

    Each is that of `serve`, with its options and texts. A request goes to a server that has read its beginning, if that
    is not too busy. Needs `outrider[ray]`; docs/scale.md tells the rest.
    """
    EngineConfig.of(model=model, **settings.engine)
    config, wanted = ServeConfig(**settings.serve), DeployConfig(**settings.deploy)
    config.keys()  # a wrong file is refused before anything is started
    try:
        from outrider.deploy.run import deployed, until_told
        from outrider.server.logs import JsonFormatter
    except ImportError as error:
        raise ConfigError(f'deploy needs {error.name}, which is not here: install "outrider[ray]"') from error
    fetch_if_missing(model)
    log = logging.getLogger("outrider")
    with logs(JsonFormatter()), deployed(model, settings.engine, config, wanted) as address:
        until_told(lambda: log.info("%s is served at %s/v1", model, address))
        log.info("stopping: requests that run get %g s to finish", config.shutdown_grace)
