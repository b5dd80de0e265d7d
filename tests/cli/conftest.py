"""Fixtures of the command line's tests: run it in this process, with stand-ins for engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import outrider
from outrider.cli import main
from tests.cli.fakes import FakeLLM


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The engines that verbs opened, in order; every `LLM` is a fake."""
    opened: list[FakeLLM] = []

    def open_fake(model: str, *, progress: Any = None, **settings: Any) -> FakeLLM:
        opened.append(FakeLLM(model, settings))
        return opened[-1]

    monkeypatch.setitem(vars(outrider), "LLM", open_fake)
    return opened


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command line in this process."""

    def run(*words: str) -> Ran:
        code = main(words)
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
