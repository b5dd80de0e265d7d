"""The servers of a deployment as Ray Serve reaches them; its errors become ours here."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from outrider.deploy.relay import Absent, Answer, Ask, Lost, Pin
from outrider.deploy.replica import Report

REPORT_SECONDS = 3.0
"""A server that says nothing for so long when asked how it is, is left out."""


class Fleet:
    """The servers behind a deployment handle.

    Args:
        handle: of the deployment of `Replica`. patience: seconds that a request waits for a server to take it.
    """

    def __init__(self, handle: Any, patience: float) -> None:
        self._handle = handle
        self._asking = handle.options(method_name="answer", stream=True)
        self._reporting = handle.options(method_name="report")
        self._patience = patience
        self._known: set[str] = set()

    async def ask(self, ask: Ask) -> Answer:
        """Ask one; what it says first is that it has the request."""
        response = self._asking.remote(ask)
        has_ended = False
        try:
            try:
                async with asyncio.timeout(self._patience):
                    first = await anext(response)
            except TimeoutError as error:
                raise Absent(f"no server was free for {self._patience:g} s: try again later") from error
            yield first
            async for said in response:
                yield said
            has_ended = True
        except StopAsyncIteration as error:
            raise Lost("it said nothing") from error
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise Absent("all servers have as much as they can take: try again later") from error
        except RayTaskError:  # the server lives, and failed: that is no reason to ask another one
            raise
        except (RayError, RayServeException) as error:
            raise Lost(f"{type(error).__name__}") from error
        finally:
            if not has_ended:
                with contextlib.suppress(RayError, RayServeException, asyncio.CancelledError):
                    response.cancel()

    async def reports(self) -> list[Report]:
        """How those are that answer in time."""
        try:
            answers = self._handle.broadcast("report")
            told = await answers.results_async(timeout_s=REPORT_SECONDS, return_exceptions=True)
            self._known = {one.server for one in told if isinstance(one, Report)}
        except TimeoutError:  # one that hangs takes them all along: those that are known are asked one by one
            # In contexts of their own: in one, Ray gives all calls one id, and its router takes one for another.
            calls = [(self._report(server), contextvars.Context()) for server in sorted(self._known)]
            told = await asyncio.gather(*(asyncio.create_task(call, context=context) for call, context in calls))
        return sorted((one for one in told if isinstance(one, Report)), key=lambda report: report.server)

    async def _report(self, server: str) -> Report | None:
        response = self._reporting.remote(Pin(server))
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                report: Report = await response
                return report
        except (RayError, RayServeException, TimeoutError) as error:
            logging.getLogger("outrider").warning("replica %s does not say how it is: %r", server, error)
            response.cancel()
            return None
