"""Where the lean layers of several ranks come together: behind the two projections of a layer that lead back into the
residual stream, and behind the output head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.base import Linear, Program
from outrider.models.lean_layer import project
from outrider.models.ranks.group import Ranks


@dataclass(frozen=True, slots=True)
class Cut:
    """Before verb `at` of a program, `residual` and every rank's `partial` are added into `out`: (capacity, H) each."""

    at: int
    partial: Tensor
    residual: Tensor
    out: Tensor


class Join:
    """Joins the ranks of one model; with one rank alone it does nothing but run its linears.

    Attributes:
        head: all of it on rank 0, whose drafters want it so; elsewhere this rank's part. nbytes: of a part beside it.
    """

    def __init__(self, ranks: Ranks | None, head: Linear, hidden: int) -> None:
        self.head = head
        self.nbytes = 0
        self._ranks = ranks
        self._hidden = hidden
        self._vocab_size = head.out_features
        self._program: Program | None = None
        self._cuts: list[Cut] = []
        self._partial: Tensor | None = None
        self._part, self._count = head, head.out_features
        if ranks is None:
            return
        self._count = count = -(-head.out_features // ranks.size)
        start = min(ranks.rank * count, head.out_features - 1)  # a rank without words of its own fills its part up
        stop = min(start + count, head.out_features)
        self._part = head.rows(torch.arange(start, stop, device=ranks.device))
        if ranks.leads:
            self.nbytes = self._part.nbytes
        else:
            self.head = self._part

    def project(self, parts: list[Linear], x: Tensor, residual: Tensor, out: Tensor | None) -> Tensor:
        """The linears side by side, of all ranks, added to the residual stream: (T, H)."""
        if self._ranks is None:
            return project(parts, x, residual=residual, out=out)
        if self._program is None:
            return self._ranks.add(project(parts, x), residual, out)
        if self._partial is None or self._partial.shape[0] < x.shape[0]:
            self._partial = torch.empty(x.shape[0], self._hidden)
        assert out is not None
        project(parts, x, out=self._partial)
        self._cuts.append(Cut(len(self._program), self._partial, residual, out))
        return out

    def logits(self, normed: Tensor) -> Tensor:
        """(M, H) -> (M, V) float32: each rank computes its words, and has those of all."""
        if not normed.shape[0]:
            return torch.empty(0, self._vocab_size, device=normed.device)
        part = self._part(normed)
        if self._ranks is None:
            return part
        return self._ranks.columns(part, self._count, self._vocab_size)

    @contextmanager
    def recording(self, program: Program) -> Iterator[list[Cut]]:
        """Within the block verbs are recorded -> where the program is to be cut."""
        self._program, self._cuts = program, []
        try:
            yield self._cuts
        finally:
            self._program = None

    def at(self, cut: Cut, num_rows: int) -> int:
        """Add what ranks have there, in the first rows -> the verb that follows."""
        assert self._ranks is not None
        self._ranks.add(cut.partial[:num_rows], cut.residual[:num_rows], cut.out[:num_rows])
        return cut.at
