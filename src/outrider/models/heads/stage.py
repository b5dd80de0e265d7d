"""A few verbs over buffers of their own, recorded or captured once where that can be: what a draft head is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.base import Kernels, KeyIndex, Linear, Program
from outrider.kernels.packing import GROUP, quantise
from outrider.models.batch import FlatBatch
from outrider.models.graph import Output, PassGraphs, bucket

Buffers = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a pass stand: positions, slots (T,) int32, and their keys; see `Kernels`."""

    positions: Tensor
    slots: Tensor
    keys: KeyIndex


def nowhere(num_rows: int, device: torch.device) -> Rows:
    """For verbs that read no position and no key."""
    blank = torch.zeros(num_rows, dtype=torch.int32, device=device)
    return Rows(blank, blank, KeyIndex(blank[:, None], blank, blank, blank[:, None], blank, 1))


class Stage:
    """Runs `body(buffers, rows)` over any number of rows, as one native call where the kernels record, and as one graph
    on a GPU (whose filling rows compute what nobody reads, and write to slot 0).

    Args:
        shapes: of one row of every buffer, by name. body: calls verbs with `out` in these buffers, and reads nothing
            else that is made anew between two runs; it sees all rows of the buffers while it is recorded, and the
            first T where every verb runs at once.
    """

    def __init__(
        self,
        kernels: Kernels,
        device: torch.device,
        shapes: Mapping[str, tuple[int, ...]],
        body: Callable[[Buffers, Rows], None],
    ) -> None:
        self._kernels = kernels
        self._device = device
        self._shapes = shapes
        self._body = body
        self._capacity = 0
        self._buffers: dict[str, Tensor] = {}
        self._rooms: dict[int, dict[str, Tensor]] = {}
        self._outgrown: list[dict[str, Tensor]] = []
        """Buffers that a graph of whole cycles may still hold."""
        self._program: Program | None = None
        self._graphs = PassGraphs(kernels.graph_pool) if device.type == "cuda" else None

    def room(self, num_rows: int) -> dict[str, Tensor]:
        """The first `num_rows` rows of every buffer, to be filled before `run` and read after it."""
        if num_rows > self._capacity:
            self._capacity = max(16, 1 << (num_rows - 1).bit_length())
            if self._graphs:
                self._outgrown.append(self._buffers)
            self._buffers = {
                name: torch.zeros(self._capacity, *shape, device=self._device) for name, shape in self._shapes.items()
            }
            self._rooms = {}
            self._program = self._record()
            if self._graphs is not None:  # they were over the buffers that went
                self._graphs = type(self._graphs)(self._kernels.graph_pool)
        if num_rows not in self._rooms:
            self._rooms[num_rows] = {name: buffer[:num_rows] for name, buffer in self._buffers.items()}
        return self._rooms[num_rows]

    def run(self, rows: Rows) -> None:
        """Run over the first T = `rows.positions.shape[0]` rows; `room` was asked for as many."""
        if self._program is not None:
            self._program.run(0, len(self._program), rows.positions, rows.slots, rows.keys)
            return
        size = bucket(rows.positions.shape[0])
        # No token is read here: positions stand in for them.
        batch = FlatBatch(rows.positions, rows.positions, rows.slots, rows.keys)
        if self._graphs is None or size is None:
            self._through(batch)
        else:
            self._graphs(None, self._through, batch, self, size, list(self._buffers.values()))

    def _through(self, batch: FlatBatch, _stage: object = None) -> Output:
        self._body(self.room(batch.num_rows), Rows(batch.positions, batch.slots, batch.keys))
        return batch.positions, {}

    def _record(self) -> Program | None:
        recorder = self._kernels.record()
        if recorder is None:
            return None
        # Which rows run, and where their keys lie, is said at each run: these stand in for them.
        with recorder as program:
            self._body(self._buffers, nowhere(self._capacity, self._device))
        return program


def pack(
    weight: Tensor, kernels: Kernels, device: torch.device, kind: str | None = None, bias: Tensor | None = None
) -> Linear:
    """Weights (N, K) of a draft head for these kernels.

    A draft's own arithmetic is free, so 8 bits serve where a kernel reads them fast.

    Args:
        kind: "q8", "q4", "bfloat16" or "float32"; None is "q8" on native kernels, "bfloat16" elsewhere.
    """
    chosen = kind or ("q8" if kernels.name == "native" else "bfloat16")
    if chosen in ("q8", "q4") and weight.shape[1] % GROUP == 0 and bool(weight.isfinite().all()):
        quants, scales, minima = quantise(weight, chosen)
        least = None if minima is None else minima.to(device)
        return kernels.pack_quantised(chosen, quants.to(device), scales.to(device), least, bias)
    return kernels.pack(weight.to(device, torch.float32 if chosen == "float32" else torch.bfloat16), bias)
