"""The check of a server: what its tests can see is said first, then what they found."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import typer

from outrider.cli.render import notes, print_json, write
from outrider.errors import ConfigError
from outrider.measure.endpoint.answers import Route
from outrider.measure.endpoint.client import Endpoint
from outrider.measure.endpoint.examine import examine
from outrider.measure.endpoint.findings import Report
from outrider.measure.endpoint.plan import Plan
from outrider.measure.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A server, and perhaps a trusted one; `models` and `keys` are of both, `raw` asks without a chat template."""

    url: str
    reference: str | None
    models: tuple[str | None, str | None]
    keys: tuple[str | None, str | None]
    raw: bool
    at_once: int
    timeout: float
    plan: Plan

    def check(self, prompts: list[Prompt], as_json: bool) -> None:
        """Put the server to every test, show what was found, and exit 1 where something is broken.

        Raises:
            ConfigError: a server cannot be reached, or says nothing.
        """
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout={self.timeout} is out of range: give seconds above 0")
        if self.raw and not all(isinstance(prompt.content, str) for prompt in prompts):
            raise ConfigError("--raw takes prompts that are texts: leave out those that are messages")
        report = asyncio.run(self._run(prompts, as_json))
        if as_json:
            print_json(report.to_json())
        else:
            write("".join(f"{line}\n" for line in report.lines()))
        if report.broken:
            raise typer.Exit(1)

    async def _run(self, prompts: list[Prompt], as_json: bool) -> Report:
        def begin(power: str) -> None:
            if not as_json:
                write(f"{power}\n")

        asked: list[Any] = [prompt.content for prompt in prompts]
        endpoint = self._endpoint(self.url, 0)
        reference = None if self.reference is None else self._endpoint(self.reference, 1)
        console = notes()
        try:
            with console.status("meeting the server") as status:
                return await examine(
                    endpoint,
                    asked,
                    self.plan,
                    reference,
                    begin,
                    lambda name, done, total: status.update(f"test {done + 1} of {total}: {name}"),
                )
        finally:
            await endpoint.close()
            if reference is not None:
                await reference.close()

    def _endpoint(self, url: str, which: int) -> Endpoint:
        route: Route = "completions" if self.raw else "chat"
        option = ("--api-key-file", "--reference-key-file")[which]
        return Endpoint(url, self.models[which], self.keys[which], route, self.at_once, self.timeout, option)
