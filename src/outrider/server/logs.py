"""Structured logs: one JSON object a line, one line a request, each with its request's id."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

LOGGER = "outrider.access"
"""Where every request is told of, once, when it is over."""


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, and whatever `facts` it carries."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def tell_all() -> None:
    """Write what this package logs to standard error, in this form; for a process that has no command line of ours."""
    logger = logging.getLogger("outrider")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def tell(message: str, facts: dict[str, Any]) -> None:
    """Log a request that is over."""
    logging.getLogger(LOGGER).info(message, extra={"facts": facts})
