"""`outrider serve`: an OpenAI-compatible server over one engine."""

from __future__ import annotations

import logging

from outrider.cli.options import Model, Settings, takes
from outrider.cli.session import logs, session
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.server.settings import ServeConfig


@takes(EngineConfig, ServeConfig)
def serve(model: Model, *, settings: Settings) -> None:
    """Serve a model over HTTP, as OpenAI does; every text is the one that `generate` gives for its seed.

    Logs go to standard error, one JSON object a line. SIGTERM and Ctrl-C let running requests finish.
    """
    config = ServeConfig(**settings.serve)
    config.keys()  # a wrong file is refused before the model is loaded
    try:
        from outrider.server.logs import JsonFormatter
        from outrider.server.run import Runner
        from outrider.server.service import Server
    except ImportError as error:
        raise ConfigError(f'the server needs {error.name}, which is not here: install "outrider[serve]"') from error
    log = logging.getLogger("outrider")
    with logs(JsonFormatter()), session(model, settings.engine) as llm:
        runner = Runner(Server.of(llm, config), log.info)
        listening = runner.open()
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        log.info("%s is served at http://%s:%d/v1, exact by %s", model, shown, port, llm.resolved.exactness)
        runner.serve_until_stopped(listening)
        log.info("stopped")
