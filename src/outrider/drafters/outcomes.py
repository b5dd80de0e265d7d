"""What became of a drafter's last trees: every node that the walk reached tells how its children fared."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.base import Commit
from outrider.drafters.candidates import Candidate
from outrider.request import Request
from outrider.tree import ROOT, DraftTree


class Outcomes:
    """Remembers each request's last tree until the pass that verified it is observed."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, dict[int, list[tuple[int, Candidate]]]]] = {}

    def remember(self, request: Request, tree: DraftTree, candidates: Sequence[Candidate]) -> None:
        """candidates: N, one a node."""
        children: dict[int, list[tuple[int, Candidate]]] = {}
        for node, (parent, candidate) in enumerate(zip(tree.parents, candidates, strict=True)):
            children.setdefault(parent, []).append((node, candidate))
        self._last[request.id] = (len(request.output), children)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Let the tables learn, walking each tree along what was delivered."""
        for commit in commits:
            position, children = self._last.pop(commit.request.id, (-1, {}))
            output = commit.request.output
            if position != len(output) - commit.num_new:
                continue
            node: int | None = ROOT
            while node is not None and position < len(output):
                token, here, node = output[position], children.get(node, ()), None
                for child, candidate in here:
                    hit = candidate.token == token
                    if candidate.table is not None:
                        candidate.table.learn(candidate.cell, candidate.prior, candidate.rank, hit)
                    if hit:
                        node = child
                position += 1

    def end(self, request: Request) -> None:
        self._last.pop(request.id, None)
