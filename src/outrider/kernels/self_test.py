"""Bit-compares every kernel's rows alone with the same rows among random neighbours: the invariance contract, tried."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.errors import KernelError
from outrider.kernels.base import Kernels, KeyIndex
from outrider.kernels.packing import quantise_outputs

WIDTHS = (*range(1, 18), 64)
"""Rows a call."""

_ROWS = 16
"""Different rows; a wider call holds some of them several times."""

_HIDDEN, _OUT, _HEADS, _KV_HEADS, _DIM, _SLOTS, _BLOCK, _VOCAB = 160, 72, 4, 2, 40, 320, 16, 500


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """One kernel's result: `detail` names the first width and place at which a row's bits differed, or is empty."""

    kernel: str
    passed: bool
    detail: str = ""


Case = Callable[[Tensor], Tensor]
"""Takes (T,) int64 numbers of rows and gives their results; row i's inputs depend on i alone."""


def self_test(kernels: Kernels, device: torch.device | None = None) -> list[TestOutcome]:
    """Try every kernel on small random inputs; takes a fraction of a second on a CPU."""
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(0)
        cases = _cases(kernels, torch.device("cpu") if device is None else device, generator)
        widths = (*WIDTHS, *kernels.wide)
        return [_try(name, case, widths, generator) for name, case in cases.items()]


def _try(name: str, case: Case, widths: tuple[int, ...], generator: torch.Generator) -> TestOutcome:
    alone = torch.cat([case(torch.tensor([i])) for i in range(_ROWS)])
    for width in widths:
        rows = torch.randint(0, _ROWS, (width,), generator=generator)
        same = (case(rows) == alone[rows]).view(width, -1).all(dim=1)
        if not same.all():
            place = int((~same).nonzero()[0, 0])
            return TestOutcome(name, False, f"at width {width} the row at place {place} differs from itself alone")
    return TestOutcome(name, True)


def _cases(kernels: Kernels, device: torch.device, generator: torch.Generator) -> dict[str, Case]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    x, weight, residual = normal(_ROWS, _HIDDEN), normal(_OUT, _HIDDEN), normal(_ROWS, _OUT)
    groups = _OUT, _HIDDEN // 32
    scales, minima = (normal(*groups).half().float() for _ in range(2))
    nibbles = torch.randint(0, 16, (_OUT, _HIDDEN), generator=generator, dtype=torch.uint8).to(device)
    octets = torch.randint(-128, 128, (_OUT, _HIDDEN), generator=generator, dtype=torch.int8).to(device)
    linears = {
        "float32": kernels.pack(weight),
        "bfloat16": kernels.pack(weight.bfloat16(), residual[0]),
        "q4": kernels.pack_quantised("q4", nibbles, scales, minima),
        "q8": kernels.pack_quantised("q8", octets, scales, None),
    }
    with suppress(KernelError):  # not every set multiplies these
        linears["int8"] = kernels.pack_quantised("int8", *quantise_outputs(weight), None)
    cases: dict[str, Case] = {
        f"linear {kind}": lambda rows, linear=linear: linear(x[rows], residual[rows])  # type: ignore[misc]
        for kind, linear in linears.items()
    }
    cases["lookup"] = lambda rows: linears["bfloat16"].lookup(rows.to(device))
    norm = normal(_HIDDEN)
    cases["rms_norm"] = lambda rows: kernels.rms_norm(x[rows], norm, 1e-5)
    cases["silu_mul"] = lambda rows: kernels.silu_mul(x[rows])
    cases["gelu_mul"] = lambda rows: kernels.gelu_mul(x[rows])
    cases["rotate_and_write"] = _rotation(kernels, normal)
    for dtype in (torch.float32, torch.bfloat16):
        cases[f"attention {str(dtype).removeprefix('torch.')}"] = _attention(kernels, normal, dtype, generator)
    logits, temperature = 3 * normal(_ROWS, _VOCAB), torch.arange(_ROWS, device=device) % 3 * 0.7
    numbers = torch.arange(_ROWS, device=device, dtype=torch.int32)
    keyed = temperature, numbers.long() << 33, numbers, numbers * 7
    cases["draw"] = lambda rows: kernels.draw(logits[rows], *(part[rows] for part in keyed))
    cases["draw of a head"] = lambda rows: linears["bfloat16"].draw(
        x[rows], keyed[0][rows], keyed[1][rows], keyed[2][rows], keyed[3][rows]
    )
    return cases


def _rotation(kernels: Kernels, normal: Callable[..., Tensor]) -> Case:
    qkv, cos, sin = normal(_ROWS, (_HEADS + 2 * _KV_HEADS) * _DIM), normal(_ROWS, _DIM // 2), normal(_ROWS, _DIM // 2)
    k_pages, v_pages = normal(_ROWS, _KV_HEADS, _DIM), normal(_ROWS, _KV_HEADS, _DIM)

    def case(rows: Tensor) -> Tensor:
        places = rows.int().to(qkv.device)
        q = kernels.rotate_and_write(qkv[rows], cos, sin, places, places, k_pages, v_pages, _HEADS, cos[0].repeat(2))
        return torch.cat([q.flatten(1), k_pages[rows].flatten(1), v_pages[rows].flatten(1)], dim=1)

    return case


def _attention(kernels: Kernels, normal: Callable[..., Tensor], dtype: torch.dtype, generator: torch.Generator) -> Case:
    k_pages, v_pages = (normal(_SLOTS, _KV_HEADS, _DIM).to(dtype) for _ in range(2))
    q = normal(_ROWS, _HEADS, _DIM)
    # Lengths on both sides of every block, mixed with short ones; the last positions lie in tails, as in a tree.
    length = torch.randint(1, 300, (_ROWS,), generator=generator, dtype=torch.int32)
    length[1::4] = length[1::4] % 20 + 1
    length[::2] = 260 + length[::2] % 40  # one request's rows have much in common, which a tile may read once for all
    keys = KeyIndex(
        tables=torch.randperm(_SLOTS // _BLOCK, generator=generator).to(torch.int32)[None].repeat(2, 1),
        request=torch.arange(_ROWS, dtype=torch.int32) % 2,
        linear=(length - 3).clamp(min=0),
        tails=torch.randint(0, _SLOTS, (_ROWS, 3), generator=generator, dtype=torch.int32),
        length=length,
        block_size=_BLOCK,
    )
    names = ("tables", "request", "linear", "tails", "length")
    keys = replace(keys, **{name: getattr(keys, name).to(q.device) for name in names})

    def case(rows: Tensor) -> Tensor:
        part = {name: getattr(keys, name)[rows].contiguous() for name in names[1:]}
        return kernels.attention(q[rows], k_pages, v_pages, replace(keys, **part), _DIM**-0.5)

    return case
