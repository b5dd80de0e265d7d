"""Recorded texts for the simulator: what a drafter that ranks would have guessed before every token, and how surely."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.drafters.base import Ask, Commit, Drafter
from outrider.drafters.candidates import Candidate
from outrider.drafters.outcomes import Outcomes
from outrider.drafters.trees import Trees
from outrider.errors import ConfigError
from outrider.request import Request, SamplingParams
from outrider.tree import EMPTY_TREE, DraftTree

DEPTH, WIDTH = 8, 3
FAINT = 0.02
"""Guesses that are less likely than this, path and all, are left out: no price lets them in."""

Node = tuple[int, int, float, int, int]
"""Token, parent, prior, rank and cell of a guess (`drafters/candidates.Candidate`)."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One text. moments: by output position, the nodes that may be guessed before that token."""

    task: str
    temperature: float
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    moments: dict[int, tuple[Node, ...]]

    def to_json(self) -> str:
        cells = {p: [[t, q, float(f"{prior:.3g}"), r, c] for t, q, prior, r, c in n] for p, n in self.moments.items()}
        return json.dumps([self.task, self.temperature, self.prompt, self.output, cells], separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Trace:
        task, temperature, prompt, output, cells = json.loads(line)
        moments = {int(position): tuple(tuple(node) for node in nodes) for position, nodes in cells.items()}
        return cls(task, temperature, tuple(prompt), tuple(output), moments)


def save_traces(path: Path, traces: Iterable[Trace]) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(trace.to_json() + "\n" for trace in traces)


def load_traces(path: Path) -> list[Trace]:
    with gzip.open(path, "rt") as file:
        return [Trace.from_json(line) for line in file]


def record(llm: Any, prompts: Iterable[tuple[str, Any]], params: SamplingParams, faint: float = FAINT) -> list[Trace]:
    """One trace a prompt, given as (task, prompt), one after the other, by an `LLM` whose drafter ranks its guesses.

    faint: the least chance of a guess, path and all, that is kept.

    Raises:
        ConfigError: without such a drafter, or where a prompt failed.
    """
    engine = llm.engine
    trees = getattr(engine.drafter, "trees", None)
    if trees is None:
        raise ConfigError(
            "nothing can be recorded of this drafter: name one that ranks its guesses, such as small_model"
        )
    told, inner = [], engine.drafter
    with _listening(trees, faint) as outcomes, engine.always_guessing(DEPTH, WIDTH):
        engine.drafter = _Silent(inner)
        try:
            for task, prompt in prompts:
                (request,) = llm.requests(llm.encode(prompt), params)
                engine.add(request)
                while not request.is_finished:
                    engine.step()
                if request.error is not None:
                    raise ConfigError(f"a prompt of {task} failed: {request.error}")
                moments = outcomes.heard.pop(request.id, {})
                output = tuple(request.output)
                told.append(Trace(task, request.params.temperature, tuple(request.prompt), output, moments))
        finally:
            engine.drafter = inner
    return told


class _Listening(Outcomes):
    """Keeps what was guessed, and learns nothing of what became of it: weights are the priors."""

    def __init__(self, faint: float) -> None:
        super().__init__()
        self._faint = faint
        self.heard: dict[int, dict[int, tuple[Node, ...]]] = {}

    def remember(self, request: Request, tree: DraftTree, candidates: Sequence[Candidate]) -> None:
        weights: list[float] = []
        places: dict[int, int] = {-1: -1}
        nodes: list[Node] = []
        for node, (parent, candidate) in enumerate(zip(tree.parents, candidates, strict=True)):
            weights.append(candidate.prior * (weights[parent] if parent >= 0 else 1.0))
            if weights[node] >= self._faint and parent in places:
                places[node] = len(nodes)
                nodes.append((candidate.token, places[parent], candidate.prior, candidate.rank, candidate.cell))
        self.heard.setdefault(request.id, {})[len(request.output)] = tuple(nodes)

    def observe(self, commits: Sequence[Commit]) -> None: ...


@contextmanager
def _listening(trees: Trees, faint: float) -> Iterator[_Listening]:
    kept, trees.outcomes = trees.outcomes, (heard := _Listening(faint))
    try:
        yield heard
    finally:
        trees.outcomes = kept


class _Silent(Drafter):
    """Stands before a drafter, which guesses at every token; nothing of it is verified."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.name, self.needs, self.nbytes = inner.name, inner.needs, inner.nbytes
        self.begin, self.observe, self.seen = inner.begin, inner.observe, inner.seen  # type: ignore[method-assign]
        self.end, self.place = inner.end, inner.place  # type: ignore[method-assign]

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        self._inner.propose(asks)
        return [EMPTY_TREE] * len(asks)
