"""Many rows warped in one call of a kernel: what each depends on is told in one copy of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.parcel import send
from outrider.kernels.warps import Fields, Steps, Warps, WarpsRows
from outrider.sampling.context import Row


def warp_rows(kernels: WarpsRows, logits: Tensor, places: Sequence[int], rows: Sequence[Row]) -> Tensor:
    """`warp` of rows that lie at `places` of the logits: (M, V) float32 -> (W, V) float32, those of the rows.

    Raises:
        RequestError: as `warp`.
    """
    return kernels.warp(logits, told(places, rows, logits.shape[1], logits.device))


def told(places: Sequence[int], rows: Sequence[Row], vocab_size: int, device: torch.device) -> Warps:
    """What a kernel is told of the rows.

    Raises:
        RequestError: a grammar fails, or names a token outside the vocabulary.
    """
    count = len(rows)
    edges = np.zeros((count, 4), dtype=np.int32)
    fields, steps = [Fields()] * count, Steps()
    addresses = np.zeros((count, 2), dtype=np.int64)
    mask = np.full(count, -1, dtype=np.int32)
    ids: list[int] = []
    values: list[float] = []
    masks: list[np.ndarray] = []
    for number, row in enumerate(rows):
        edges[number] = len(ids)
        context, params = row.context, row.context.params
        if row.is_dead or not context.warps(row.position):
            continue
        ids += params.logit_bias
        values += params.logit_bias.values()
        edges[number, 1:] = len(ids)
        if context.penalises:
            counts, in_prompt, pending = context.counted()
            addresses[number] = counts, in_prompt
            ids += pending
            ids += row.path
        edges[number, 2:] = len(ids)
        ids += row.forbidden()
        edges[number, 3] = len(ids)
        values += [0.0] * (len(ids) - len(values))
        allowed = context.allowed(row.state)
        if allowed is not None:
            mask[number] = len(masks)
            masks.append(_bits(allowed, vocab_size))
        fields[number] = context.fields
        steps |= context.fields.steps
    arrays = (
        np.array(places, dtype=np.int32),
        edges,
        np.array(ids or [0], dtype=np.int32),
        np.array(values or [0.0], dtype=np.float32),
        np.array([each.factors for each in fields], dtype=np.float32).reshape(count, 4),
        np.array([each.bounds for each in fields], dtype=np.float64).reshape(count, 2),
        np.array([each.top for each in fields], dtype=np.int32),
        addresses,
        np.stack(masks) if masks else np.zeros((1, 1), dtype=np.uint8),
        mask,
    )
    sent: Any = send(arrays, device)
    return Warps(steps, *sent)


def _bits(allowed: np.ndarray, vocab_size: int) -> np.ndarray:
    """Ids -> a bit a token, lowest first: (ceil(V / 8),) uint8."""
    flags = np.zeros(vocab_size, dtype=bool)
    flags[allowed] = True
    return np.packbits(flags, bitorder="little")
