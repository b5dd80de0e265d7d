"""Runs the application under uvicorn: told to stop, it finishes or fails what runs, and then goes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from outrider.errors import ConfigError
from outrider.server.app import create_app
from outrider.server.bridge import Bridge
from outrider.server.service import Server

DEAF_SECONDS = 60
"""A client that takes nothing of what is sent for so long is let go, as is what was kept for it."""
LAST_WORDS = 5.0
"""Seconds for answers that were failed to reach their clients."""


class Runner(uvicorn.Server):
    """A uvicorn server whose engine drains first.

    At the first signal no new request is taken (503), and those that run get `shutdown_grace` seconds; at their end, or
    at a second signal, what is left is failed with a sentence.
    """

    def __init__(self, server: Server, told: Callable[[str], None] = lambda _: None) -> None:
        self.parts = server
        self._told = told
        config = uvicorn.Config(
            create_app(server),
            host=server.config.host,
            port=server.config.port,
            http="h11",  # and not whatever parser happens to be installed: what it refuses, and how, is tested
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(server.config.shutdown_grace + LAST_WORDS) + 1,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: drain, and stop accepting; a second one does not wait."""
        bridge = self.parts.bridge
        if bridge.is_closing:
            bridge.stop()
            return
        self.stop()

    def stop(self) -> None:
        """Drain and go; may be called from any thread."""
        bridge, grace = self.parts.bridge, self.parts.config.shutdown_grace
        self._told(f"stopping: {bridge.num_open} requests get {grace:g} s to finish")
        bridge.drain()
        threading.Thread(target=_wait, args=(bridge, grace), name="drain", daemon=True).start()
        self.should_exit = True

    def open(self) -> socket.socket:
        """Take the port.

        Raises:
            ConfigError: it cannot be had.
        """
        host, port = self.parts.config.host, self.parts.config.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        taken = socket.socket(family)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # what is accepted has it too; elsewhere a proxy must see to it
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAF_SECONDS * 1000)
        try:
            taken.bind((host, port))
        except OSError as error:
            taken.close()
            raise ConfigError(
                f"port {port} of {host!r} cannot be had ({error.strerror}): choose another --port or --host"
            ) from error
        return taken

    def serve_until_stopped(self, listening: socket.socket) -> None:
        """Serve on a socket of `open` until told to stop; to be called from the main thread, which gets the signals."""
        with contextlib.closing(listening):
            asyncio.run(self.serve([listening]))


def _wait(bridge: Bridge, grace: float) -> None:
    """Give running requests their time, then fail the rest."""
    deadline = time.monotonic() + grace
    while bridge.num_open and time.monotonic() < deadline:
        time.sleep(0.02)
    bridge.stop()
