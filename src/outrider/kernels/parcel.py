"""Small arrays of numbers on their way to a device: all in one copy, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("float64", "int64", "float32", "int32", "uint8")}
_ALIGNED = 16
"""Bytes at whose multiples an array begins."""


def send(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Arrays -> tensors of the same shapes and dtypes, views of one memory; on a CPU each shares its array's.

    A copy of its own would cost each as much as what it holds a hundred times over, and one that the host waits for
    waits for all that the device does before.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    ends, end = [], 0
    for array in arrays:
        end = -(-end // _ALIGNED) * _ALIGNED + array.nbytes
        ends.append(end)
    whole = np.empty(end, dtype=np.uint8)
    for array, stop in zip(arrays, ends, strict=True):
        whole[stop - array.nbytes : stop] = array.reshape(-1).view(np.uint8)
    there = torch.from_numpy(whole).to(device, non_blocking=True)
    return [
        there[stop - array.nbytes : stop].view(_DTYPES[array.dtype]).view(array.shape)
        for array, stop in zip(arrays, ends, strict=True)
    ]
