"""`bench` as one report: rows of acceptance and of speed, what theory says of depths, the limit, memory, failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.measure.bench import PLAIN, Figures
from outrider.measure.ceiling import Sureness
from outrider.measure.cells import cells
from outrider.measure.survey import Row
from outrider.measure.theory import Seen, predict

BEYOND = 2
"""Depths that are predicted behind the deepest that was measured."""


class Engines:
    """What is kept of every engine that a report opens: what was decided for it, and once what its device can read."""

    def __init__(self) -> None:
        self.described: dict[str, Any] = {}
        self.limit: dict[str, Any] | None = None

    def take(self, drafter: str, llm: Any) -> None:
        from outrider.measure.bandwidth import measure_bandwidth

        self.described[drafter] = llm.describe()
        if self.limit is None:
            self.limit = asdict(measure_bandwidth(llm.engine.target.device))

    @staticmethod
    def weigh(plain: Any, together: int, context: int) -> int:
        """Bytes that a pass of plain decoding reads: the weights, and every request's keys and values."""
        from outrider.measure.passes import key_bytes, streamed_bytes

        target = plain.engine.target
        return streamed_bytes(target, together) + together * key_bytes(target, context)


def report(
    head: Mapping[str, Any],
    tasks: Mapping[str, Sequence[Any]],
    accepted: Sequence[Row],
    ceilings: Mapping[float, Mapping[str, Sureness]],
    fast: Sequence[Row],
    engines: Engines,
) -> dict[str, Any]:
    """All of it as plain data.

    Args:
        head: where it comes from (command, commit, date, machine) and how it was asked for.
    """
    prices = engines.described.get(PLAIN, {}).get("pass_seconds", {})
    return {
        **head,
        "tasks": {task: len(prompts) for task, prompts in tasks.items()},
        "acceptance": [row.to_json() for row in accepted],
        "ceiling": {f"{t:g}": {task: asdict(found) for task, found in by.items()} for t, by in ceilings.items()},
        "speed": [speed_row(row, engines.limit) for row in fast],
        "cells": cells(fast),
        "theory": theory(fast, prices),
        "limit": engines.limit,
        "engines": engines.described,
        "failures": failures(fast),
    }


def failures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every prompt that was not answered: by whom, at which temperature and load, and why."""
    found = []
    for row in rows:
        if row.speeds:
            for name, figures in zip((row.variant.drafter, PLAIN), row.overall(), strict=True):
                where = {"who": name, "temperature": row.variant.temperature, "together": row.variant.together}
                found += [{**where, "prompt": prompt, "error": error} for prompt, error in figures.failures]
    return [entry for i, entry in enumerate(found) if entry not in found[:i]]


def speed_row(row: Row, limit: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row with its share of the read limit: the target's bytes alone, in the passes that only decode."""
    data = row.to_json()
    for name in ("overall", PLAIN):
        parts = data.get(name, {}).get("parts")
        if parts and limit and row.pass_bytes and parts["passes"]:
            seconds = sum(parts[part] for part in ("draft", "verify", "sample", "other", "flying"))
            data[name]["share_of_limit"] = parts["passes"] * row.pass_bytes / limit["bytes_per_second"] / seconds
        elif name in data:
            data[name]["share_of_limit"] = None
    return data


def theory(rows: Sequence[Row], prices: Mapping[int, float]) -> list[dict[str, Any]]:
    """Predicted curves for every drafter and temperature of which chains of fixed depth were measured."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        shape = row.variant.shape
        if shape is not None and shape.width == 1 and row.variant.together == 1 and row.error is None:
            groups.setdefault((row.variant.drafter, row.variant.temperature), []).append(row)
    found = []
    for (drafter, temperature), chains in groups.items():
        seen = [each for row in chains if (each := _seen(row)) is not None]
        deepest = max((each.depth for each in seen), default=0)
        predicted = predict(seen, prices, deepest + BEYOND) if prices else None
        if predicted is not None:
            found.append({"drafter": drafter, "temperature": temperature, **predicted})
    return found


def _seen(row: Row) -> Seen | None:
    """None where a side has no passes whose parts are known."""
    mine, plain = row.overall()
    draft, least = _per_pass(mine), _per_pass(plain)
    if draft is None or least is None or row.variant.shape is None:
        return None
    return Seen(row.variant.shape.depth, mine.pooled(), draft[0], least[0], least[2], least[1])


def _per_pass(figures: Figures) -> tuple[float, float, float] | None:
    """Seconds of draft, verify and the whole of a mean decoding pass."""
    parts = figures.parts()
    if parts is None or not parts.passes or parts.flying:
        return None
    return parts.draft / parts.passes, parts.verify / parts.passes, parts.decoding / parts.passes
