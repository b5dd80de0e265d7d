"""Grows draft trees best-first by path weight, level by level, from whatever gives logits for a level's nodes.

Every level expands the `width` best of its nodes in one go; the tree is the best nodes of all levels (EAGLE-2,
2406.16858), stopping where the next one's weight no longer pays its price (`Budget.prices`; the width rule of CAST,
2610.00321). Weights never rise along a path, so the best nodes are closed under parents.
Under the rejection rule nothing that was drawn may be dropped, so how many children each node of a level gets is
settled before any of them is drawn: as many as the best tree would give it if all went as it goes on average (Sequoia,
2402.12374).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from outrider.drafters.base import Ask, Commit
from outrider.drafters.candidates import Candidate, Candidates, Place
from outrider.drafters.outcomes import Outcomes
from outrider.request import Request
from outrider.tree import EMPTY_TREE, ROOT, Budget, DraftTree

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Level:
    """P nodes at one depth whose children are wanted, those of one ask side by side.

    Attributes:
        depth: theirs, the first level being 1. asks, tokens: of each row.
        origins: each row's parent as a row of the logits before: of the level above, or, at depth 1, the ask's number.
    """

    depth: int
    asks: tuple[Ask, ...]
    tokens: tuple[int, ...]
    origins: tuple[int, ...]


Expand = Callable[[Level], tuple[Tensor, Sequence[float] | None]]
"""A level to its logits (P, V_d), and, from a drafter that doubts itself, a factor of each row's weights."""


@dataclass(slots=True)
class _Sprout:
    """One request's tree while it grows: every candidate so far, in the order found."""

    ask: Ask
    is_drawn: bool
    candidates: list[Candidate] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    frontier: list[tuple[int, int]] = field(default_factory=list)
    """Nodes to be expanded now (`ROOT` first), and how many children each may get."""
    fresh: list[int] = field(default_factory=list)

    @property
    def budget(self) -> Budget:
        return self.ask.budget

    def add(self, parent: int, origin: int, candidate: Candidate) -> None:
        self.fresh.append(len(self.candidates))
        self.candidates.append(candidate)
        self.parents.append(parent)
        self.origins.append(origin)
        self.weights.append(candidate.weight * (1.0 if parent == ROOT else self.weights[parent]))

    def place(self, node: int) -> Place:
        path: list[int] = []
        while node != ROOT:
            path.append(self.candidates[node].token)
            node = self.parents[node]
        return Place(self.ask.context, tuple(path[::-1]))

    def chosen(self) -> list[int]:
        """The nodes that the tree would have now, best first: a topological order."""
        if self.is_drawn:
            return list(range(len(self.candidates)))
        return best_nodes(self.weights, self.budget)


class Trees:
    """Grows trees for any drafter with logits, and learns from what became of them.

    Args:
        acceptance: "match" or "rejection". kept: target ids of the columns of the logits (see `Candidates`).
    """

    def __init__(self, candidates: Candidates, acceptance: str) -> None:
        self._candidates = candidates
        self._rejects = acceptance == "rejection"
        self.outcomes = Outcomes()

    def grow(
        self, asks: Sequence[Ask], logits: Tensor, expand: Expand, trust: Sequence[float] | None = None
    ) -> list[DraftTree]:
        """One tree an ask. logits: (A, V_d) float32 after the last known token of each; trust: of each, as `Expand`."""
        # A greedy request has one text, so both rules are the match rule for it.
        sprouts = [_Sprout(ask, self._rejects and ask.context.temperature > 0) for ask in asks]
        rows = []
        for index, sprout in enumerate(sprouts):
            sprout.frontier = [(ROOT, sprout.budget.width)]
            if sprout.is_drawn:
                sprout.frontier = [(ROOT, self._shares(sprout, [1.0], sprout.budget.depth)[0])]
            rows.append((sprout, ROOT, index))
        depth = 1
        while True:
            self._sprout(sprouts, logits, trust)
            rows = [(sprout, node, sprout.origins[node]) for sprout in sprouts for node in self._advance(sprout, depth)]
            if not rows:
                break
            asked, nodes, origins = zip(*rows, strict=True)
            tokens = (sprout.candidates[node].token for sprout, node in zip(asked, nodes, strict=True))
            logits, trust = expand(Level(depth, tuple(s.ask for s in asked), tuple(tokens), origins))
            depth += 1
        return [self._finish(sprout) for sprout in sprouts]

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn from what became of each request's last tree."""
        self.outcomes.observe(commits)

    def end(self, request: Request) -> None:
        self.outcomes.end(request)

    def _sprout(self, sprouts: Sequence[_Sprout], logits: Tensor, trust: Sequence[float] | None) -> None:
        """Give every node of the frontiers its children."""
        rows = [(sprout, node, num) for sprout in sprouts for node, num in sprout.frontier]
        ranked = [index for index, (sprout, _, _) in enumerate(rows) if not sprout.is_drawn]
        for sprout in sprouts:
            sprout.fresh = []
        if ranked:
            part = logits if len(ranked) == len(rows) else logits[ranked]
            doubts = None if trust is None else [trust[index] for index in ranked]
            places = [rows[index][0].place(rows[index][1]) for index in ranked]
            budgets = [rows[index][0].budget for index in ranked]
            if all(budget.width == 1 and not budget.prices for budget in budgets):
                found = self._candidates.first(part, places)
            else:
                found = self._candidates.best(part, places, max(budget.width for budget in budgets), doubts)
            for index, candidates in zip(ranked, found, strict=True):
                sprout, node, num = rows[index]
                for candidate in candidates[:num]:
                    sprout.add(node, index, candidate)
        drawn = [index for index, (sprout, _, num) in enumerate(rows) if sprout.is_drawn and num]
        if drawn:
            part = logits if len(drawn) == len(rows) else logits[drawn]
            doubts = None if trust is None else [trust[index] for index in drawn]
            asked, nodes, nums = zip(*(rows[index] for index in drawn), strict=True)
            places = [sprout.place(node) for sprout, node in zip(asked, nodes, strict=True)]
            families = self._candidates.draw(part, places, nums, nodes, doubts)
            for index, sprout, node, (candidates, law) in zip(drawn, asked, nodes, families, strict=True):
                for candidate in candidates:
                    sprout.add(node, index, candidate)
                    sprout.laws.append(law)

    def _advance(self, sprout: _Sprout, depth: int) -> list[int]:
        """The nodes of the level just found, at `depth`, that are worth expanding; they are the next frontier."""
        budget = sprout.budget
        nodes = sorted(sprout.fresh, key=lambda node: (-sprout.weights[node], node))[: budget.width]
        sprout.frontier = []
        if depth >= budget.depth or not nodes:
            return []
        if sprout.is_drawn:
            num_chosen = len(sprout.candidates)
            counts = self._shares(sprout, [sprout.weights[node] for node in nodes], budget.depth - depth)
            frontier = [(node, count) for node, count in zip(nodes, counts, strict=True) if count]
        else:
            chosen = sprout.chosen()
            num_chosen = len(chosen)
            # A child weighs no more than its parent: it cannot enter a full tree whose last node weighs as much.
            floor = sprout.weights[chosen[-1]] if num_chosen == budget.nodes else -1.0
            least = budget.price(num_chosen)
            weighed = [(node, sprout.weights[node]) for node in nodes if node in chosen]
            frontier = [(node, budget.width) for node, weight in weighed if weight > floor and weight >= least]
        # All that the level could bring is that the target's token lies below one of its nodes.
        if sum(sprout.weights[node] for node, _ in frontier) < budget.level_price + budget.price(num_chosen):
            return []
        sprout.frontier = sorted(frontier)
        return [node for node, _ in sprout.frontier]

    def _shares(self, sprout: _Sprout, weights: Sequence[float], levels: int) -> list[int]:
        used = len(sprout.candidates)
        return shares(weights, self._candidates.rate, sprout.budget, used, levels)

    def _finish(self, sprout: _Sprout) -> DraftTree:
        """The tree; it is remembered until it is known what became of it."""
        chosen = sprout.chosen()
        if not chosen:
            return EMPTY_TREE
        chosen = lines_first(chosen, [sprout.parents[node] for node in chosen])
        places = {node: place for place, node in enumerate(chosen)} | {ROOT: ROOT}
        picked = [sprout.candidates[node] for node in chosen]
        parents = [places[sprout.parents[node]] for node in chosen]
        laws = torch.stack([sprout.laws[node] for node in chosen]) if sprout.laws else None
        promise = sum(sprout.weights[node] for node in chosen)
        tree = DraftTree(tuple(candidate.token for candidate in picked), tuple(parents), laws, promise)
        self.outcomes.remember(sprout.ask.request, tree, picked)
        return tree


def likeliest_paths(
    start: State, budget: Budget, children: Callable[[State, int], Iterable[tuple[Candidate, State]]]
) -> tuple[DraftTree, list[Candidate]]:
    """The tree of the likeliest paths where looking further costs nothing, and the candidate of each of its nodes.

    Node by node, as long as the next one pays its price. children: of a state, at a depth from 1, likeliest first; a
    state is whatever tells a drafter where it stands, and the first one is `start`.
    """
    picked: list[Candidate] = []
    parents: list[int] = []
    promise = 0.0
    found = itertools.count()
    heap: list[tuple[float, int, int, int, Candidate, State]] = []

    def offer(parent: int, weight: float, depth: int, state: State) -> None:
        for candidate, after in children(state, depth):
            heapq.heappush(heap, (-weight * candidate.weight, next(found), depth, parent, candidate, after))

    offer(ROOT, 1.0, 1, start)
    while heap and len(picked) < budget.nodes:
        negative, _, depth, parent, candidate, after = heapq.heappop(heap)
        if -negative < budget.price(len(picked)):
            break
        if depth < budget.depth:
            offer(len(picked), -negative, depth + 1, after)
        picked.append(candidate)
        parents.append(parent)
        promise -= negative
    order = lines_first(range(len(picked)), parents)
    places = {node: place for place, node in enumerate(order)} | {ROOT: ROOT}
    picked, parents = [picked[node] for node in order], [places[parents[node]] for node in order]
    return DraftTree(tuple(candidate.token for candidate in picked), tuple(parents), promise=promise), picked


def lines_first(nodes: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The nodes with their parents, in topological order, in an order where each is followed by its first child.

    So the likeliest path lies in line, and its keys need not be moved once it is accepted; siblings keep their order.
    """
    children: dict[int, list[int]] = {}
    for node, parent in zip(nodes, parents, strict=True):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    waiting = children.get(ROOT, [])[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += children.get(order[-1], [])[::-1]
    return order


def best_nodes(weights: Sequence[float], budget: Budget) -> list[int]:
    """Indices of the nodes of largest path weight, in that order, as long as the next one pays its price.

    weights: path weights in topological order, none above its parent's; ties go to the earlier node, so that a parent
    always comes before its children.
    """
    ranked = sorted(range(len(weights)), key=lambda node: (-weights[node], node))[: budget.nodes]
    for place, node in enumerate(ranked):
        if weights[node] < budget.price(place):
            return ranked[:place]
    return ranked


def shares(weights: Sequence[float], rate: Callable[[int], float], budget: Budget, used: int, levels: int) -> list[int]:
    """How many children each node of a level shall get, from path weights and mean rates alone.

    They are the children it has in the best tree of `budget.nodes - used` more nodes over `levels` more levels, if
    every child of rank r, anywhere, weighs `rate(r)` of its parent.
    """
    counts = [0] * len(weights)
    heap = [(-weight * rate(0), 1, 0, index, weight) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    while heap and used < budget.nodes:
        negative, level, rank, index, above = heapq.heappop(heap)
        if -negative < budget.price(used):
            break
        used += 1
        counts[index] += level == 1
        if rank + 1 < budget.width:
            heapq.heappush(heap, (-above * rate(rank + 1), level, rank + 1, index, above))
        if level < levels:
            heapq.heappush(heap, (negative * rate(0), level + 1, 0, index, -negative))
    return counts
