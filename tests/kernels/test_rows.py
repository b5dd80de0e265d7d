"""Norm, gate, rotation and the write into pages against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.kernels import base


@pytest.mark.parametrize("size", [7, 16, 40, 576])
def test_rms_norm(kernels, normal, size):
    x, weight = normal(5, size), normal(size)
    golden = nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), golden, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [5, 64, 300])
def test_gates(kernels, normal, size):
    x = normal(3, 2 * size) * 4
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -30.0])
    gate, up = x.double().chunk(2, dim=1)
    silu, gelu = nn.functional.silu(gate) * up, nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(kernels.silu_mul(x).double(), silu, atol=2e-5, rtol=2e-6)
    torch.testing.assert_close(kernels.gelu_mul(x).double(), gelu, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("pages", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("dim", "half", "normed"), [(16, 8, False), (40, 20, True), (64, 16, False), (8, 0, False)])
def test_rotation_and_write(kernels, normal, dim, half, normed, pages):
    heads, kv, rows = 3, 2, 5
    qkv, cos, sin = normal(rows, (heads + 2 * kv) * dim), normal(30, half), normal(30, half)
    positions = torch.tensor([0, 29, 7, 8, 7], dtype=torch.int32)
    slots = torch.tensor([3, 0, 9, -1, 4], dtype=torch.int32)
    norms = (normal(dim), normal(dim)) if normed else (None, None)
    before = normal(10, kv, dim).to(pages)
    k_pages, v_pages = before.clone(), before.clone()
    q = kernels.rotate_and_write(qkv, cos, sin, positions, slots, k_pages, v_pages, heads, *norms, 1e-6)

    parts = qkv.double().view(rows, -1, dim)
    c, s = (t[positions.long()].double().unsqueeze(1) for t in (cos, sin))

    def turned(x, weight):
        if weight is not None:
            x = nn.functional.rms_norm(x, (dim,), weight.double(), 1e-6)
        # Transformers' own formula, on the rotated part: x * cos + rotate_half(x) * sin.
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1)

    torch.testing.assert_close(q.double(), turned(parts[:, :heads], norms[0]), atol=1e-5, rtol=1e-5)
    written = slots >= 0
    places, loose = slots[written].long(), 1e-5 if pages == torch.float32 else 1e-2
    golden = turned(parts[:, heads : heads + kv], norms[1])[written]
    torch.testing.assert_close(k_pages[places].double(), golden, atol=loose, rtol=loose)
    assert torch.equal(v_pages[places], qkv.view(rows, -1, dim)[written, heads + kv :].to(pages))
    untouched = [slot for slot in range(10) if slot not in places.tolist()]
    assert torch.equal(k_pages[untouched], before[untouched])


def test_bfloat16_pages_round_as_pytorch_does(native, normal):
    values = normal(1, 3 * 64) * torch.logspace(-30, 30, 192)
    values[0, -5:] = torch.tensor([torch.nan, torch.inf, -0.0, 1.00390625, 1.01171875])  # the last two are ties
    k_pages, v_pages = (torch.zeros(1, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    zero, none = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 0)
    native.rotate_and_write(values, none, none, zero, zero, k_pages, v_pages, 1)
    golden = values[0, 128:].to(torch.bfloat16)
    assert torch.equal(v_pages[0, 0].view(torch.int16)[:-5], golden.view(torch.int16)[:-5])
    assert v_pages[0, 0, -5].isnan()
    assert torch.equal(v_pages[0, 0, -4:], golden[-4:])


def test_a_program_runs_what_its_verbs_run_at_once(native, normal):
    """Recorded over buffers for 8 rows, run over 3: the same bits, and nothing past the third row is touched."""
    weight, x, norm = normal(48, 32), normal(8, 32), normal(32)
    linear = native.pack(weight)
    normed, y = torch.full((8, 32), 7.0), torch.full((8, 48), 7.0)
    with native.record() as program:
        native.rms_norm(x, norm, 1e-5, out=normed)
        linear(normed, out=y)
    assert len(program) == 2
    assert (y == 7).all(), "recording runs nothing"
    blank = torch.zeros(3, dtype=torch.int32)
    index = base.KeyIndex(blank[:, None], blank, blank, blank[:, None], blank, 1)
    program.run(0, 2, blank, blank, index)
    assert torch.equal(y[:3], linear(native.rms_norm(x[:3], norm, 1e-5)))
    assert (y[3:] == 7).all()
