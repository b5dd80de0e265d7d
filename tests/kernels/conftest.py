"""The kernel sets under test: native for this CPU, native compiled for older ones, Triton's, and the plain twins."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from outrider.errors import KernelError
from outrider.kernels import select
from outrider.kernels.native import load_native
from outrider.kernels.plain import PlainKernels
from tests.interpreter import round_as_a_gpu_does

TARGETS = {
    "native": ("-march=native",),
    "avx2": ("-mavx2", "-mfma", "-mno-avx512f"),
    "portable": ("-march=x86-64",),
}
ALL_KERNELS = (*TARGETS, "triton", "plain")


def make(name: str, threads: int = 2):
    """Kernels by name; skips with the reason where this machine cannot run them."""
    if name == "plain":
        return PlainKernels(torch.device("cpu"))
    if name == "triton":
        return make_triton()
    if name != "native" and platform.machine() != "x86_64":
        pytest.skip(f"{name} is compiled for x86-64 and this machine is {platform.machine()}")
    if name == "avx2" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    try:
        return load_native(threads, TARGETS[name])
    except KernelError as error:
        pytest.skip(str(error))


def make_triton():
    """Triton's kernels on a CPU, run by its interpreter.

    Split attention folds parts into chunks of two and those into stretches of two: the interpreter takes as long for a
    part that is not there, and of a GPU's stretches of sixteen most of those of short texts are not there.
    """
    pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux on x86-64)")
    if torch.cuda.is_available():
        pytest.skip("with a GPU here Triton's kernels run on it: pytest -m gpu")
    round_as_a_gpu_does()
    from outrider.kernels.triton import attention

    attention.PARTS = attention.CHUNKS = 2
    return select("triton", torch.device("cpu"))


@pytest.fixture(scope="session", params=["native", "avx2", "portable"])
def native(request):
    """Native kernels of each instruction set."""
    return make(request.param)


@pytest.fixture(scope="session", params=ALL_KERNELS)
def kernels(request):
    """Every kernel set."""
    return make(request.param)


@pytest.fixture(scope="session")
def plain():
    return PlainKernels(torch.device("cpu"))


@pytest.fixture
def normal():
    """Repeatable normal noise by shape."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)
