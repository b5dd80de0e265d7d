"""Traces for the simulator: what each drafter would have guessed at every token of a text, and whether it was right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.drafters.base import Ask, Drafter
from outrider.drafters.outcomes import outcome
from outrider.errors import ConfigError
from outrider.request import Request, SamplingParams
from outrider.tree import EMPTY_TREE, Budget, DraftTree

DEPTH = 8
PRICED = Budget(DEPTH, 4, 20, prices=(0.06, 0.08, 0.1, 0.12), level_price=0.12)
"""What drafters that rank are told while they are recorded: about what a row and a level cost on a CPU."""
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Moment:
    """One drafter before one token: its grade, and of the tree it would have made the levels that held the text that
    followed, its nodes and its levels (all 0 where it had nothing to say).
    """

    grade: int | None
    hits: int
    nodes: int
    levels: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One text. moments: by position of the completion, from its second token on, and by drafter."""

    task: str
    temperature: float
    prompt: int
    arms: tuple[str, ...]
    moments: tuple[tuple[Moment, ...], ...]

    def to_json(self) -> str:
        cells = "".join(_written(moment) for each in self.moments for moment in each)
        return json.dumps([self.task, self.temperature, self.prompt, "+".join(self.arms), cells])

    @classmethod
    def from_json(cls, line: str) -> Trace:
        task, temperature, prompt, names, cells = json.loads(line)
        arms = tuple(names.split("+"))
        read = [_read(cells[at : at + 4]) for at in range(0, len(cells), 4)]
        each = tuple(tuple(read[at : at + len(arms)]) for at in range(0, len(read), len(arms)))
        return cls(task, temperature, prompt, arms, each)


def load_traces(path: Path) -> list[Trace]:
    """A trace a line, as `Trace.to_json` wrote them."""
    return [Trace.from_json(line) for line in path.read_text().splitlines()]


class Listener(Drafter):
    """Stands before the drafters of an engine: they guess at every token, and nothing of it is verified."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.name, self.needs, self.nbytes = inner.name, inner.needs, inner.nbytes
        self.begin, self.observe, self.seen = inner.begin, inner.observe, inner.seen  # type: ignore[method-assign]
        self.end, self.place = inner.end, inner.place  # type: ignore[method-assign]
        self.heard: dict[int, list[tuple[int, list[tuple[int | None, DraftTree]]]]] = {}

    @property
    def members(self) -> tuple[Drafter, ...]:
        return self._inner.members

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        for ask in asks:
            told = []
            for member in self.members:
                chosen = PRICED if member.needs.ranks else Budget(DEPTH, 1, DEPTH)
                budget = replace(chosen, depth=min(ask.budget.depth, DEPTH), nodes=min(ask.budget.nodes, chosen.nodes))
                asked = replace(ask, budget=budget)
                told.append((member.grade(ask.request), member.propose([asked])[0]))
            self.heard.setdefault(ask.request.id, []).append((len(ask.request.output), told))
        return [EMPTY_TREE] * len(asks)


def record(llm: Any, prompts: Iterable[tuple[str, Any]], params: SamplingParams) -> list[Trace]:
    """One trace a prompt, given as (task, prompt), one after the other, by an `LLM` that has a drafter.

    Raises:
        ConfigError: without a drafter, or where a prompt failed.
    """
    engine = llm.engine
    if engine.drafter is None:
        raise ConfigError("drafter='none' guesses nothing: name the drafters whose guesses are to be recorded")
    listener, inner = Listener(engine.drafter), engine.drafter
    traces = []
    engine.drafter = listener
    try:
        with engine.always_guessing(DEPTH, inner.needs.width):
            for task, prompt in prompts:
                (request,) = llm.requests(llm.encode(prompt), params)
                engine.add(request)
                while not request.is_finished:
                    engine.step()
                if request.error is not None:
                    raise ConfigError(f"a prompt of {task} failed: {request.error}")
                traces.append(_trace(task, request, listener))
    finally:
        engine.drafter = inner
    return traces


def _trace(task: str, request: Request, listener: Listener) -> Trace:
    moments = []
    for position, told in listener.heard.pop(request.id, []):
        said = request.output[position:]
        each = []
        for grade, tree in told:
            levels, hits = outcome(tree, said) if len(tree) else (0, 0)
            each.append(Moment(grade, hits, len(tree), levels))
        moments.append(tuple(each))
    arms = tuple(listener.name.split("+"))
    return Trace(task, request.params.temperature, len(request.prompt), arms, tuple(moments))


def _written(moment: Moment) -> str:
    first = UNKNOWN if moment.grade is None else DIGITS[min(moment.grade, 35)]
    return first + "".join(DIGITS[min(count, 35)] for count in (moment.hits, moment.nodes, moment.levels))


def _read(cell: str) -> Moment:
    grade, *counts = (None if digit == UNKNOWN else DIGITS.index(digit) for digit in cell)
    return Moment(grade, *(count or 0 for count in counts))
