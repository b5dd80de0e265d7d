"""Grows draft trees level by level with any model that gives logits; a chain is the tree of width 1.

Under the match rule a level keeps the `width` best nodes by path weight over all parents (as EAGLE-2, 2406.16858).
Under the rejection rule nothing that was drawn may be dropped, so the best node alone gets `width` children.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.drafters.base import Ask
from outrider.drafters.candidates import Candidate, draft_law, matching
from outrider.kernels.base import Kernels
from outrider.models.batch import BatchBuilder, FlatBatch
from outrider.sampling.context import Row
from outrider.sampling.rejection import draft_siblings
from outrider.tree import EMPTY_TREE, ROOT, DraftTree

MAX_ROWS = 512
"""Rows of one pass of a stack that catches up with a long prompt."""


@dataclass(slots=True)
class _Sprout:
    """One request's tree while it grows."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_weights: list[float] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=list)

    def tree(self) -> DraftTree:
        if not self.tokens:
            return EMPTY_TREE
        laws = torch.stack(self.laws) if self.laws else None
        return DraftTree(tuple(self.tokens), tuple(self.parents), laws)

    def path(self, node: int) -> list[int]:
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def row(self, node: int) -> Row:
        """Where a child of `node` would be drawn."""
        return self.ask.context.rows(DraftTree.chain([self.tokens[i] for i in self.path(node)]))[-1]

    def add(self, parent: int, candidate: Candidate) -> None:
        above = 0.0 if parent == ROOT else self.log_weights[parent]
        self.frontier.append(len(self.tokens))
        self.tokens.append(candidate.token)
        self.parents.append(parent)
        self.log_weights.append(above + candidate.log_weight)


class Grower:
    """Grows trees for a model that `run`s flat batches over its own pages.

    Args:
        run: a pass -> logits (M, V) float32. acceptance: "match" or "rejection".
    """

    def __init__(
        self, run: Callable[[FlatBatch], Tensor], kernels: Kernels, acceptance: str, block_size: int, vocab_size: int
    ) -> None:
        self._run = run
        self._kernels = kernels
        self._acceptance = acceptance
        self._block_size = block_size
        self._vocab_size = vocab_size

    def grow(self, asks: Sequence[Ask], starts: Sequence[int], device: torch.device) -> list[DraftTree]:
        """One tree an ask. `starts`: the first known token of each request that this stack has no keys for."""
        sprouts = [_Sprout(ask) for ask in asks]
        logits = self._catch_up(asks, starts, device)
        parents = [(sprout, ROOT) for sprout in sprouts]
        for level in range(1, max(ask.budget.depth for ask in asks) + 1):
            self._sprout(parents, logits)
            growing = [
                s for s in sprouts if level < s.ask.budget.depth and s.frontier and len(s.tokens) < s.ask.budget.nodes
            ]
            if not growing:
                break
            parents = [(sprout, node) for sprout in growing for node in self._expandable(sprout)]
            logits = self._expand(parents, device)
        return [sprout.tree() for sprout in sprouts]

    def _catch_up(self, asks: Sequence[Ask], starts: Sequence[int], device: torch.device) -> Tensor:
        """Run all known tokens that the stack has not seen; logits (A, V) after the last of each."""
        logits = []
        builder = BatchBuilder(self._block_size)
        for ask, start in zip(asks, starts, strict=True):
            stop = ask.request.num_tokens
            while start < stop:
                size = min(stop - start, MAX_ROWS - builder.num_rows)
                builder.request(ask.table)
                builder.line(start, ask.request.tokens(start, start + size), int(start + size == stop))
                start += size
                if builder.num_rows == MAX_ROWS:
                    logits.append(self._run(builder.build(device)))
                    builder = BatchBuilder(self._block_size)
        if builder.num_rows:
            logits.append(self._run(builder.build(device)))
        return self._fit(torch.cat(logits) if len(logits) > 1 else logits[0])

    def _expand(self, parents: Sequence[tuple[_Sprout, int]], device: torch.device) -> Tensor:
        """Run the nodes that get children: logits (P, V)."""
        builder = BatchBuilder(self._block_size)
        previous = None
        for sprout, node in parents:
            if sprout is not previous:
                builder.request(sprout.ask.table)
                previous = sprout
            sprout.slots[node] = sprout.ask.scratch[len(sprout.slots)]
            path = [sprout.slots[i] for i in sprout.path(node)]
            builder.node(sprout.tokens[node], sprout.ask.request.num_tokens, path)
        return self._fit(self._run(builder.build(device)))

    def _expandable(self, sprout: _Sprout) -> list[int]:
        nodes = sprout.frontier
        if self._acceptance == "rejection":
            nodes = [max(nodes, key=lambda node: sprout.log_weights[node])]
        sprout.frontier = []
        return nodes

    def _sprout(self, parents: Sequence[tuple[_Sprout, int]], logits: Tensor) -> None:
        """Give every parent its children, one request at a time."""
        if self._acceptance == "match":
            width = max(sprout.ask.budget.width for sprout, _ in parents)
            rows = [sprout.row(node) for sprout, node in parents]
            offered: dict[int, list[tuple[float, int, Candidate]]] = {}
            by_id = {id(sprout): sprout for sprout, _ in parents}
            for (sprout, node), candidates in zip(parents, matching(logits, rows, width, self._kernels), strict=True):
                above = 0.0 if node == ROOT else sprout.log_weights[node]
                offered.setdefault(id(sprout), []).extend((above + c.log_weight, node, c) for c in candidates)
            for key, choices in offered.items():
                sprout = by_id[key]
                room = sprout.ask.budget.nodes - len(sprout.tokens)
                choices.sort(key=lambda choice: -choice[0])
                for _, node, candidate in choices[: min(room, sprout.ask.budget.width)]:
                    sprout.add(node, candidate)
            return
        for (sprout, node), row_logits in zip(parents, logits, strict=True):
            self._draw_siblings(sprout, node, row_logits)

    def _draw_siblings(self, sprout: _Sprout, node: int, logits: Tensor) -> None:
        """Children drawn from q without replacement; their number depends on the budget alone."""
        row = sprout.row(node)
        q = draft_law(logits, row)
        if q is None:
            return
        request = sprout.ask.request
        num = min(sprout.ask.budget.width, sprout.ask.budget.nodes - len(sprout.tokens))
        cycle = sprout.ask.context.position
        for token in draft_siblings(q, num, request.seed, request.sample, cycle, node):
            sprout.add(node, Candidate(token, float(q[token].log())))
            sprout.laws.append(q)

    def _fit(self, logits: Tensor) -> Tensor:
        """A drafter that lacks the target's last ids never proposes them."""
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size] if missing else logits
