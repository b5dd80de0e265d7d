"""Running estimates of the trees that a drafter which ranks its guesses makes by itself, shrunk to all requests'."""

from __future__ import annotations

from dataclasses import dataclass, replace

OWN_MEMORY, POOL_MEMORY = 64.0, 400.0
"""Trees after which old evidence has lost most of its weight."""
SHRINK = 4.0
"""All requests' trees count as much as so many of a request's own."""
DOUBT = 4.0
"""A drafter's promises are believed as if so many promised tokens had fared as all requests' did."""
HOPED = (1.5, 2.5, 2.0)
"""Tokens accepted, nodes and levels of a tree before any was seen: worth a try, and soon given up."""
HOPE = 3.0
"""Trees that this counts for."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Means of trees: tokens accepted, nodes, levels."""

    accepted: float
    nodes: float
    levels: float


@dataclass(slots=True)
class _Trees:
    """Means of promised tokens, nodes and levels over `count` trees; of the promised tokens, `kept` of `owed` came."""

    promised: float
    nodes: float
    levels: float
    count: float = 0.0
    kept: float = 0.0
    owed: float = 0.0

    def learn(self, accepted: int, promised: float, nodes: int, levels: int, memory: float) -> None:
        self.count = min(memory, self.count + 1)
        self.promised += (promised - self.promised) / self.count
        self.nodes += (nodes - self.nodes) / self.count
        self.levels += (levels - self.levels) / self.count
        fade = 1 - 1 / memory
        self.kept = self.kept * fade + accepted
        self.owed = self.owed * fade + promised


class Shapes:
    """A shape a request, and one of all requests of about its temperature.

    What a drafter promised counts, corrected by how its promises were kept, and not only what was accepted: trees bring
    0 or 4 tokens by chance, and what is to be told from that is often less than a fifth of one.
    """

    def __init__(self) -> None:
        self._pools: dict[int, _Trees] = {}
        self._own: dict[int, _Trees] = {}

    def of(self, request_id: int, heat: int) -> Shape:
        """heat: what requests of about the same temperature have in common."""
        pool, trust = self._pool(heat), self.trust(request_id, heat)
        own = self._own.get(request_id)
        if own is None:
            return Shape(pool.promised * trust, pool.nodes, pool.levels)
        share = own.count / (own.count + SHRINK)

        def mean(of_own: float, of_all: float) -> float:
            return share * of_own + (1 - share) * of_all

        promised = mean(own.promised, pool.promised)
        return Shape(promised * trust, mean(own.nodes, pool.nodes), mean(own.levels, pool.levels))

    def trust(self, request_id: int, heat: int) -> float:
        """How many accepted tokens a promised one stands for."""
        pool, own = self._pool(heat), self._own.get(request_id)
        trust = (pool.kept + DOUBT) / (pool.owed + DOUBT)
        return trust if own is None else (own.kept + DOUBT * trust) / (own.owed + DOUBT)

    def learn(self, request_id: int, heat: int, accepted: int, promised: float | None, nodes: int, levels: int) -> None:
        """A tree is settled. promised: None where its drafter did not say."""
        told = float(accepted) if promised is None else promised
        pool = self._pool(heat)
        own = self._own.setdefault(request_id, replace(pool, count=0.0, kept=0.0, owed=0.0))
        own.learn(accepted, told, nodes, levels, OWN_MEMORY)
        pool.learn(accepted, told, nodes, levels, POOL_MEMORY)

    def forget(self, request_id: int) -> None:
        self._own.pop(request_id, None)

    def _pool(self, heat: int) -> _Trees:
        """A new one begins as hoped."""
        return self._pools.setdefault(heat, _Trees(*HOPED, count=HOPE))
