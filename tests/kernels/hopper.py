"""Compiles every Triton kernel for a Hopper GPU on a machine that has none, and prints what each one takes.

Run as a program, without TRITON_INTERPRET: Triton's driver is stood in for, tensors lie on PyTorch's "meta" device, and
a launch ends where it has compiled. What it prints, a line a kernel: name, warps, registers a thread, bytes of spilled
registers, bytes of shared memory, programs that one multiprocessor holds, programs of the launch that compiled it, and
what these fill of an H100 at once. With the argument `orders`, a line a linear's kind: how many inputs stand side by
side in front of its tiles' instructions.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton

from outrider.kernels.base import KeyIndex
from outrider.kernels.places import Relative, Standing
from outrider.kernels.sprouts import Fits, Frontier, Ranked
from outrider.kernels.tree import PageTable, Trees
from outrider.kernels.triton import TritonKernels, linear
from outrider.kernels.triton.exchange import ROOM, Exchange
from outrider.kernels.triton.offline import only_compile
from outrider.kernels.warps import Steps, Warps

META = torch.device("meta")
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


PROCESSORS = 132
"""Of an H100."""


def held(warps: int, registers: int, shared: int) -> int:
    """Programs that a multiprocessor holds: it has 65,536 registers, 227 KiB of shared memory and room for 64 warps."""
    by_registers = 65536 // (warps * 32 * (-(-registers // 8) * 8))
    return min(by_registers, 227 * 1024 // (shared + 1024), 64 // warps, 32)


def tell(name: str, kernel, programs: int) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(part.split(":") for line in told.stdout.splitlines() if "REG:" in line for part in line.split())
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    fit = held(warps, int(usage["REG"]), shared)
    filled = f"{programs / (fit * PROCESSORS):.2f}"
    print(name, warps, usage["REG"], usage["STACK"], shared, fit, programs, filled, flush=True)


def compile_and_tell() -> None:
    hashes = set()

    def told(function, kernel, grid) -> None:
        if kernel.hash not in hashes:
            hashes.add(kernel.hash)
            tell(function.__name__, kernel, math.prod(grid))

    only_compile(told=told)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def ints(*shape: int) -> torch.Tensor:
    return floats(*shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return floats(*shape, dtype=torch.int64)


def attend(kernels, rows, heads, kv_heads, dim, context, dtype=torch.bfloat16, **options) -> None:
    keys = KeyIndex(ints(2, context // 16), ints(rows), ints(rows), ints(rows, 16), ints(rows), 16)
    pages = [floats(4096, kv_heads, dim, dtype=dtype) for _ in range(2)]
    for out in (None, floats(rows, heads, dim, dtype=torch.bfloat16)):
        kernels.attention(floats(rows, heads, dim), *pages, keys, dim**-0.5, out=out, **options)


def multiply_and_norm(kernels: TritonKernels, rows: int) -> None:
    """The shapes of an 8B's layer, by a few rows and by many."""
    for num_outputs, num_inputs in ((6144, 4096), (4096, 14336), (1024, 2048)):
        for dtype in (torch.bfloat16, torch.float32):
            linear = kernels.pack(floats(num_outputs, num_inputs, dtype=dtype))
            linear(floats(rows, num_inputs), floats(rows, num_outputs))
            linear.gated(floats(rows, num_inputs), "silu")
        quants = floats(num_outputs, num_inputs, dtype=torch.int8)
        # Whether scales are exact in 16 bits is read from them, and these hold nothing.
        linear = type(linear)("q8", quants, floats(num_outputs, num_inputs // 32, dtype=torch.float16))
        linear(floats(rows, num_inputs))
        linear = kernels.pack_quantised("int8", quants, floats(num_outputs), None)
        linear(floats(rows, num_inputs), floats(rows, num_outputs))
        linear.gated(floats(rows, num_inputs), "silu")
    linear.lookup(longs(rows))
    keyed = floats(rows), longs(rows), ints(rows), ints(rows)
    for head in (kernels.pack(floats(128256, 4096, dtype=torch.bfloat16)), linear):
        head.draw(floats(rows, head.in_features), *keyed)
    kernels.rms_norm(floats(rows, 4096), floats(4096), 1e-5)
    kernels.silu_mul(floats(rows, 2 * 14336))
    kernels.gelu_mul(floats(rows, 2 * 14336))
    pages = [floats(4096, 8, 128, dtype=torch.bfloat16) for _ in range(2)]
    tables = floats(4096, 64), floats(4096, 64)
    for norm in (None, floats(128)):
        kernels.rotate_and_write(floats(rows, 48 * 128), *tables, ints(rows), ints(rows), *pages, 32, norm, norm, 1e-5)


def tell_orders() -> None:
    """Tiles whose inputs stand in one order have one number; wgmma that reads shared memory has that of 2, and no name
    for it."""
    found = set()
    only_compile(told=lambda _, kernel, grid: found.update(re.findall(r"kWidth = (\d+)", kernel.asm["ttgir"]) or ["2"]))
    quants, widths = floats(272, 1024, dtype=torch.int8), (1, 17, 33, 65, 130, 600)
    for kind, weight, scales in (
        ("bfloat16", floats(272, 1024, dtype=torch.bfloat16), None),
        ("int8", quants, floats(272)),
        ("q8", quants, floats(272, 32, dtype=torch.float16)),
    ):
        found.clear()
        for tile in dict.fromkeys(
            linear.choose(r, n, 1024, scales is not None) for r in widths for n in (1, 4096, 9999, 99999)
        ):
            x, out = floats(600, 1024, dtype=torch.bfloat16), floats(600, 272)
            linear.TritonLinear(kind, weight, scales).run(x, None, out, tile)
        print(kind, *sorted(found), flush=True)


def exchange_numbers() -> None:
    """A sum over the rows of a pass, the words of a head, and the whole numbers of an order."""
    for ranks in (2, 4):
        for overlap in (False, True):
            made = Exchange(0, (longs(2, ranks, ROOM),) * ranks, overlap)
            made.add(floats(64, 8192), floats(64, 8192), floats(64, 8192))
            made.gather(floats(4, 128256 // ranks), 128256 // ranks, 128256)
            made.spread(None, 1000)


def main() -> None:
    compile_and_tell()
    exchange_numbers()
    for overlap in (False, True):
        kernels = TritonKernels(META, overlap=overlap)
        for rows in (1, 16, 64, 512):
            multiply_and_norm(kernels, rows)
            attend(kernels, rows, 32, 8, 128, 1024)
            attend(kernels, rows, 32, 8, 128, 32768)
    attend(kernels, 16, 32, 8, 128, 1024, window=300, softcap=5.0, sinks=floats(32))
    for heads, kv_heads, dim in ((9, 3, 64), (32, 32, 80), (16, 2, 96), (8, 1, 256), (64, 1, 64)):
        for dtype in (torch.bfloat16, torch.float32):
            attend(kernels, 16, heads, kv_heads, dim, 1024, dtype)
    attend(kernels, 64, 8, 1, 256, 8192, softcap=5.0)
    for rows in (1, 65):
        keyed = floats(rows), longs(rows), ints(rows), ints(rows)
        kernels.draw(floats(rows, 128256), *keyed)
        kernels.rank(floats(rows, 128256), 33, *keyed)
        kernels.rank(floats(rows, 32000), 9, *keyed, longs(32000))
    for steps in (Steps(), Steps(True, True, True, True)):
        edits = ints(64), ints(64, 4), ints(64), floats(64), floats(64, 4), floats(64, 2, dtype=torch.float64), ints(64)
        masks = longs(64, 2), floats(1, 16032, dtype=torch.uint8), ints(64)
        kernels.warp(floats(64, 128256), Warps(steps, *edits, *masks))
    standing = Standing(longs(2), longs(2), ints(2, 64), 16)
    for depth, are_known in ((1, True), (1, False), (8, False)):
        rows = Relative(longs(2, 9), longs(1, 9).expand(2, -1), longs(2, 9), longs(2, 9, depth), longs(2), are_known)
        kernels.place(standing, rows, 128256)
    fits = Fits((0.0,) * 3, (0.0,) * 3, 8.0)
    for num, width, depth in ((1, 4, 0), (4, 4, 3), (8, 8, 7)):
        above = Frontier(longs(2, num), floats(2, num), longs(2, num, depth), longs(2 * num), longs(2, num))
        ranks = floats(2 * num, width + 1, dtype=torch.float64), longs(2 * num, width + 1)
        for trust in (None, floats(2 * num)):
            ranked = Ranked(floats(2 * num, 32000), *ranks, floats(2 * num, dtype=torch.float64), trust)
            kernels.sprout(ranked, above, width, floats(2), fits, longs(32000))
    trees = Trees(longs(64), ints(64), ints(2), ints(1), 64, 8)
    walks = kernels.walk(longs(65), trees)
    for word_bytes in (2, 4):
        kernels.compact(PageTable((floats(1),) * 64, longs(64), ints(64), 512, word_bytes), ints(64), trees, walks)


if __name__ == "__main__":
    tell_orders() if sys.argv[1:] == ["orders"] else main()
