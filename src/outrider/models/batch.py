"""The flat batch: every row of one forward pass, of all requests, without padding between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.base import KeyIndex


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """T rows of one pass; a row is a prompt token, a request's last token, or a node of its draft tree.

    Attributes:
        tokens: (T,) int64. positions: (T,) int32. slots: (T,) int32, where this row's key and value are written.
        keys: where each row finds its keys (its own included, written before it is read).
        logit_rows: (M,) int64, the rows whose logits are asked for, or None for all rows.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    keys: KeyIndex
    logit_rows: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one pass yields.

    Attributes:
        logits: (M, V) float32 for the rows in `logit_rows`, V the model's true vocabulary (padding cut off).
        taps: hidden states (T, H) float32 after the layers asked for, by layer.
    """

    logits: Tensor
    taps: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """One request's rows in a pass: known tokens in a line, then guesses that hang off the last of them.

    Attributes:
        table: the request's block table. start: position of the first known token.
        tokens: known tokens, written to the table's own slots.
        nodes, parents, node_slots: guesses as in `DraftTree`, and the slot each is written to.
        num_logits: logits are asked for the last so many known tokens, and for every node unless 0.
    """

    table: Sequence[int]
    start: int
    tokens: Sequence[int]
    nodes: Sequence[int] = ()
    parents: Sequence[int] = ()
    node_slots: Sequence[int] = ()
    num_logits: int = 1

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + len(self.nodes)

    @property
    def num_logit_rows(self) -> int:
        return self.num_logits + len(self.nodes) if self.num_logits else 0


def build_batch(parts: Sequence[Part], block_size: int, device: torch.device) -> FlatBatch:
    """Lay the parts end to end; a row's keys are written by rows at or before it.

    The rows of `logits` come part by part: the last known tokens, then the nodes.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    request: list[int] = []
    linear: list[int] = []
    tails: list[list[int]] = []
    logit_rows: list[int] = []
    for index, part in enumerate(parts):
        stop = part.start + len(part.tokens)
        first = len(tokens)
        tokens += part.tokens
        tokens += part.nodes
        positions += range(part.start, stop)
        slots += [
            part.table[position // block_size] * block_size + position % block_size
            for position in range(part.start, stop)
        ]
        linear += range(part.start + 1, stop + 1)
        tails += [[0]] * len(part.tokens)
        request += [index] * part.num_rows
        paths: list[list[int]] = []
        for parent, slot in zip(part.parents, part.node_slots, strict=True):
            path = [*paths[parent], slot] if parent >= 0 else [slot]
            paths.append(path)
            positions.append(stop - 1 + len(path))
            linear.append(stop)
        slots += part.node_slots
        tails += paths
        if part.num_logits:
            logit_rows += range(first + len(part.tokens) - part.num_logits, len(tokens))
    num_blocks = max(len(part.table) for part in parts)
    longest = max(map(len, tails))
    index_of = torch.tensor([[*part.table, *[0] * (num_blocks - len(part.table))] for part in parts], dtype=torch.int32)
    columns = torch.tensor([positions, slots, request, linear], dtype=torch.int32)
    tail_of = torch.tensor([[*tail, *[0] * (longest - len(tail))] for tail in tails], dtype=torch.int32)
    all_rows = len(logit_rows) == len(tokens)
    keys = KeyIndex(
        tables=index_of.to(device),
        request=columns[2].to(device),
        linear=columns[3].to(device),
        tails=tail_of.to(device),
        length=(columns[0] + 1).to(device),
        block_size=block_size,
    )
    return FlatBatch(
        tokens=torch.tensor(tokens).to(device),
        positions=columns[0].to(device),
        slots=columns[1].to(device),
        keys=keys,
        logit_rows=None if all_rows else torch.tensor(logit_rows, dtype=torch.int64).to(device),
    )
