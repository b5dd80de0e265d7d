"""Which kernels serve a device, and the check that they keep the invariance contract."""

from __future__ import annotations

import torch

from outrider.errors import KernelError
from outrider.kernels.base import Kernels, KeyIndex, Linear, Program
from outrider.kernels.native import load_native
from outrider.kernels.plain import PlainKernels
from outrider.kernels.self_test import TestOutcome, self_test

__all__ = ["Kernels", "KeyIndex", "Linear", "Program", "TestOutcome", "select", "self_test"]


def select(kind: str, device: torch.device, threads: int | None = None) -> Kernels:
    """Kernels for `device`: "native", "plain", or "auto" (native on a CPU where it can be built, else plain).

    Raises:
        KernelError: if "native" was asked for and cannot run here.
    """
    if kind == "native" and device.type != "cpu":
        raise KernelError(f"the native kernels run on a CPU and the device is {device}: choose kernels='plain'")
    if kind == "native" or (kind == "auto" and device.type == "cpu"):
        try:
            return load_native(threads)
        except KernelError as error:
            if kind == "native":
                raise
            return PlainKernels(device, note=f"the plain kernels serve, many times slower: {error}")
    return PlainKernels(device)
