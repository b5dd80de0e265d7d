"""Compiles linears without the device that they are for: in other processes, so that many are compiled at once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from outrider.kernels.triton.linear import Tile, TritonLinear

MOST_PROCESSES = 16


@dataclass(frozen=True, slots=True)
class Form:
    """What a linear's kernel is compiled for, beside its tile.

    Attributes:
        kind: of `TritonLinear`. activation: of a gated product. has_residual: one is added.
    """

    num_outputs: int
    num_inputs: int
    kind: str = "bfloat16"
    activation: str | None = None
    has_residual: bool = False


class Absent:
    """A driver that knows what it would run on and cannot run anything."""

    def __init__(self, capability: int = 90) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def only_compile(capability: int = 90, told: Callable[[Any, Any, Any], None] = lambda *given: None) -> None:
    """From now on launches of this process end where they have compiled.

    told: of the function, its kernel and its grid.
    """
    triton.runtime.driver.set_active(Absent(capability))
    run = JITFunction.run

    def compile_and_tell(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel is not None:
            told(self, kernel, grid)
        return kernel

    JITFunction.run = compile_and_tell


def compile_all(
    forms: Sequence[tuple[Form, Tile]], capability: int, overlap: bool
) -> tuple[ProcessPoolExecutor, list[Future[None]]]:
    """Fill Triton's cache with these kernels, in the background and in this order; what cannot be compiled is left out.
    The pool is to be shut down by whoever waits no longer."""
    count = max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 1))
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), only_compile, (capability,))
    return pool, [pool.submit(_compile, form, tile, overlap) for form, tile in forms]


def _compile(form: Form, tile: Tile, overlap: bool) -> None:
    meta = torch.device("meta")
    dtype = torch.bfloat16 if form.kind == "bfloat16" else torch.int8
    scales = None if form.kind == "bfloat16" else torch.empty(form.num_outputs, device=meta)
    weight = torch.empty(form.num_outputs, form.num_inputs, dtype=dtype, device=meta)
    x = torch.empty(2, form.num_inputs, dtype=torch.bfloat16, device=meta)
    out = torch.empty(2, form.num_outputs, device=meta)
    if form.activation:
        out = torch.empty(2, form.num_outputs // 2, dtype=torch.bfloat16, device=meta)
    linear = TritonLinear(form.kind, weight, scales, overlap=overlap)
    linear.run(x, out if form.has_residual else None, out, tile, form.activation)
