"""Every Triton kernel compiles for a Hopper GPU, and asks for no more than one has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on an H100."""


IN_OTHERS = """
from concurrent.futures import wait
from outrider.kernels.triton.linear import Tile
from outrider.kernels.triton.offline import Form, compile_all
if __name__ == "__main__":
    tiles = Tile(16, 8, 256, 2, 4), Tile(64, 16, 128, 4, 5), Tile(64, 16, 100, 4, 5)
    forms = Form(6144, 4096), Form(4096, 4096, has_residual=True), Form(28672, 4096, activation="silu")
    pool, found = compile_all([(form, tile) for form in forms for tile in tiles], 90, True)
    wait(found)
    print(*(type(future.exception()).__name__ for future in found))
"""


def compiled(cache, *arguments: str) -> list[list[str]]:
    """The words of each line that a program prints which compiles, `tests.kernels.hopper` if none is given."""
    pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux on x86-64)")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache / "cache")
    command = [sys.executable, *(arguments or ("-m", "tests.kernels.hopper"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_gpu(tmp_path):
    rows = compiled(tmp_path)
    assert {
        "multiply",
        "_draw_tile",
        "attend_parts",
        "merge",
        "_look",
        "_decide",
        "_rank_block",
        "_walk",
        "border",
        "add_parts",
        "gather_parts",
    } <= {row[0] for row in rows}
    greedy = [row for row in rows if int(row[4]) > SHARED]
    assert greedy == []
    # The first launches are of an 8B's attention in bfloat16: what spills there is read and written by every thread.
    spilled = [
        row for row in rows if row[0] in ("multiply", "merge", "_settle", "add_parts", "gather_parts") and int(row[3])
    ]
    assert spilled == []
    # Programs of an exchange wait for one another on other GPUs: all of a launch must run at once.
    waiting = [row for row in rows if row[0] in ("add_parts", "gather_parts")]
    assert all(float(row[7]) <= 1 for row in waiting)


@pytest.mark.slow
def test_all_tiles_of_a_kind_take_their_inputs_in_one_order(tmp_path):
    """Else tiles would differ in bits, as those of 8-bit weights did on a GPU."""
    found = {kind: widths for kind, *widths in compiled(tmp_path, "-m", "tests.kernels.hopper", "orders")}
    assert len(found) == 3
    assert all(len(widths) == 1 for widths in found.values())


@pytest.mark.slow
def test_linears_are_compiled_in_other_processes(tmp_path):
    """A tile that no hardware takes harms none of the others."""
    (tmp_path / "program.py").write_text(IN_OTHERS)
    (found,) = compiled(tmp_path, str(tmp_path / "program.py"))
    assert [name == "NoneType" for name in found] == [True, True, False] * 3
    assert len(list((tmp_path / "cache").rglob("multiply.cubin"))) == 6
