"""What every launch of a Triton kernel shares: the device it runs on, and the overlap with the kernel before it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = (9, 0)
"""Of a GPU that launches a kernel while the one before it still runs."""
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}
"""Keywords of a launch whose multiplications and additions round one by one. Else the compiler joins the pairs that it
finds in one layout, which are others for each tile."""


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever its tensors lie on; on a CPU its interpreter needs none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def can_overlap(device: torch.device) -> bool:
    """Whether kernels may begin before their predecessor has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def launch_options(overlap: bool) -> dict[str, Any]:
    """Keywords of a launch; the kernel is told the same by its constant `OVERLAP`."""
    return {"launch_pdl": True} if overlap else {}


@triton.jit
def begin(OVERLAP: tl.constexpr, RELEASES: tl.constexpr = True):
    """The first statement of a kernel that reads nothing but its predecessors' results.

    The successor may be set up from now on; it waits in turn. Nothing may be read, and nothing written, before this
    returns, since a chain of kernels is in order only if each of them waits for the one before it.

    RELEASES: False where the kernel lets its successor go by a `release` of its own.
    """
    if RELEASES:
        release(OVERLAP)
    wait(OVERLAP)


@triton.jit
def release(OVERLAP: tl.constexpr):
    """The successor may be set up, once every program has said so; what came before this kernel's `wait` is done then.

    So a successor of a kernel that waits first may read what its predecessor's predecessors wrote at once, if it waits
    before it ends.
    """
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Until the kernel before this one has ended, and what it wrote can be read."""
    if OVERLAP:
        gdc_wait()
