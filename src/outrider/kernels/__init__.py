"""Which kernels serve a device, and the check that they keep the invariance contract."""

from __future__ import annotations

import os

import torch

from outrider.config import cache_folder
from outrider.errors import KernelError
from outrider.kernels.base import Kernels, KeyIndex, Linear, Program
from outrider.kernels.native import load_native
from outrider.kernels.plain import PlainKernels
from outrider.kernels.self_test import TestOutcome, self_test

__all__ = ["Kernels", "KeyIndex", "Linear", "Program", "TestOutcome", "select", "self_test", "settle"]

FALLBACK_WIDTH = 16
"""Rows of every pass where kernels cannot serve several numbers of rows with the same bits."""


def select(kind: str, device: torch.device, threads: int | None = None) -> Kernels:
    """Kernels for `device`: "native" (a CPU), "triton" (a GPU), "plain", or "auto": the device's own where they can
    run, else plain.

    Raises:
        KernelError: if "native" or "triton" was asked for and cannot run here.
    """
    if kind == "native" and device.type != "cpu":
        raise KernelError(f"the native kernels run on a CPU and the device is {device}: choose kernels='plain'")
    if kind == "triton" or (kind == "auto" and device.type == "cuda"):
        return _triton(kind, device)
    if kind == "native" or (kind == "auto" and device.type == "cpu"):
        try:
            return load_native(threads)
        except KernelError as error:
            if kind == "native":
                raise
            return PlainKernels(device, note=f"the plain kernels serve, many times slower: {error}")
    return PlainKernels(device)


def _triton(kind: str, device: torch.device) -> Kernels:
    """Triton's, imported only here (it is no part of PyTorch's packages for a CPU) and tried once: it compiles with
    whatever compiler and driver the machine has."""
    if kind == "triton" and device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        raise KernelError(
            "the triton kernels run on a GPU and the device is cpu: choose kernels='auto', or set TRITON_INTERPRET=1 "
            "to debug them"
        )
    _keep_compiled()
    try:
        from outrider.kernels.triton import first_that_runs

        kernels = first_that_runs(device)
    except Exception as error:  # of a missing package, a compiler, a driver: each raises its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        if kind == "auto":
            return PlainKernels(device, note=f"the plain kernels serve, many times slower: {reason[0]}")
        raise KernelError(
            f"the triton kernels cannot run here ({reason[0]}): mend that (the package triton, a C compiler, the GPU's "
            "driver), or choose kernels='plain'"
        ) from error
    return kernels


def _keep_compiled() -> None:
    """Triton keeps what it compiles (by source, constants and GPU) in our cache folder, so that a second start finds
    it; where the user names another folder, or ours cannot be written, it keeps to that."""
    folder = cache_folder() / "triton"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder))


def settle(kernels: Kernels, device: torch.device) -> list[TestOutcome]:
    """Bit-compare a GPU's kernels at the widths in use, and let them serve as far as they passed -> what failed.

    Where the bits of linears depend on their tile one tile serves all calls; where a kernel's rows depend on their
    number still, every pass runs at one width. Either is told in `note`. Kernels for a CPU are tried by tests instead:
    they are compiled from one source whatever the width.
    """
    if device.type == "cpu" or kernels.name != "triton":
        return []
    notes = [kernels.note, kernels.keep_one_tile()]  # type: ignore[attr-defined]
    failed = [outcome for outcome in self_test(kernels, device) if not outcome.passed]
    if failed:
        kernels.fixed_width = FALLBACK_WIDTH
        names = ", ".join(outcome.kernel for outcome in failed)
        notes.append(f"every pass runs at {FALLBACK_WIDTH} rows: on this device rows of {names} depend on their number")
    kernels.note = "; ".join(note for note in notes if note) or None
    return failed
