"""Triton's linears: every tile of the table, rounded inputs, and what serves where tiles or widths differ in bits."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch

import outrider.kernels
from outrider.kernels import select, settle
from outrider.kernels.packing import quantise_outputs
from tests.kernels.conftest import make_triton
from tests.kernels.test_linear import dequantised, quantised

CUDA = torch.device("cuda")
WIDTHS = (1, 2, 15, 16, 17, 33, 64, 65, 130, 600)


@pytest.fixture(scope="module")
def triton():
    return make_triton()


def tiles():
    pytest.importorskip("triton")
    from outrider.kernels.triton import linear

    return [*linear.all_tiles(), linear.ONE_TILE]


def packed(kernels, kind: str, rows, bias=None):
    """A linear of these weights, of the kind, and the numbers by which it multiplies."""
    if kind == "q8":
        parts = [None if t is None else t.to(rows.device) for t in quantised(kind, rows.shape)]
        return kernels.pack_quantised(kind, *parts, bias), dequantised(*parts).bfloat16()
    if kind == "int8":
        quants, scales = quantise_outputs(rows)
        return kernels.pack_quantised(kind, quants, scales, None, bias), quants.double() * scales.double()[:, None]
    rows = rows.to(getattr(torch, kind))
    return kernels.pack(rows, bias), rows


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("bfloat16", (70, 96)), ("bfloat16", (20, 33)), ("q8", (70, 96)), ("int8", (70, 96)), ("int8", (20, 33))],
    ids=str,
)
def test_every_tile_multiplies(triton, normal, shape, kind):
    rows, x = normal(*shape).bfloat16(), normal(19, shape[1]).bfloat16()
    linear, weight = packed(triton, kind, rows)
    exact = x.double() @ weight.double().T
    for tile in tiles():
        out = torch.empty(19, shape[0])
        linear.run(x, None, out, tile)
        torch.testing.assert_close(out.double(), exact, atol=1e-4 * float(exact.abs().max()), rtol=1e-5)


def test_every_call_has_a_tile_whose_sizes_the_hardware_takes():
    pytest.importorskip("triton")
    from outrider.kernels.triton import linear

    for rows in (1, 16, 17, 64, 100, 500, 4096, 1 << 20):
        for outputs in (1, 576, 4096, 6144, 28672, 128256):
            tile = linear.choose(rows, outputs, 4096)
            assert tile.rows <= max(16, 2 * rows)
            assert all(size & (size - 1) == 0 and size >= 8 for size in (tile.outputs, tile.rows, tile.inputs))
            # Inputs of all stages in flight, and an H100 has 227 KiB a program.
            assert (tile.stages - 1) * (tile.outputs + tile.rows) * tile.inputs * 2 <= 227 * 1024


def test_rounding_on_the_way_is_rounding_before(triton, normal):
    """Buffers in bfloat16 between verbs save time and change no bit."""
    x, norm, gates = normal(5, 96), normal(96), normal(5, 192)
    linear = triton.pack(normal(40, 96).bfloat16(), normal(40))
    for verb in (lambda out: triton.rms_norm(x, norm, 1e-5, out), lambda out: triton.silu_mul(gates, out)):
        wide, narrow = verb(None), verb(torch.empty(5, 96, dtype=torch.bfloat16))
        assert torch.equal(wide.bfloat16(), narrow)
        assert torch.equal(linear(wide), linear(narrow))


def test_a_residual_may_be_the_result(triton, normal):
    linear, x, residual = triton.pack(normal(40, 64).bfloat16()), normal(18, 64), normal(18, 40)
    expected = linear(x, residual)
    assert linear(x, residual, out=residual) is residual
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q8", "int8"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_product_has_the_bits_of_product_and_gate(triton, normal, kind, activation):
    bias, x = normal(76), normal(18, 96)
    linear, _ = packed(triton, kind, normal(76, 96), bias)
    gate = triton.silu_mul if activation == "silu" else triton.gelu_mul
    assert torch.equal(linear.gated(x, activation), gate(linear(x)))
    narrow = torch.empty(18, 38, dtype=torch.bfloat16)
    assert torch.equal(linear.gated(x, activation, narrow), gate(linear(x)).bfloat16())


class Doubtful(SimpleNamespace):
    """Kernels of which the test decides what was found out."""

    name = "triton"
    fixed_width = note = None

    def keep_one_tile(self):
        return self.why


@pytest.mark.parametrize("why", [None, "linears run by one tile"])
@pytest.mark.parametrize("passed", [True, False])
def test_what_differs_in_bits_narrows_what_serves(monkeypatch, why, passed):
    outcomes = [outrider.kernels.TestOutcome("rms_norm", passed, "" if passed else "at width 2")]
    monkeypatch.setattr(outrider.kernels, "self_test", lambda kernels, device: outcomes)
    kernels = Doubtful(why=why)
    failed = settle(kernels, CUDA)
    assert len(failed) == (not passed)
    assert kernels.fixed_width == (None if passed else 16)
    assert (why or "") in (kernels.note or "")
    assert ("rms_norm" in (kernels.note or "")) is not passed
    assert (kernels.note is None) == (why is None and passed)


def test_kernels_for_a_cpu_are_not_tried_at_load(plain):
    assert settle(plain, torch.device("cpu")) == []


@pytest.mark.gpu
def test_on_a_gpu_no_tile_differs_in_a_bit():
    from outrider.kernels.triton.linear import differing_tiles

    for inputs in (576, 1024, 4096):
        for overlap in (False, True):
            assert differing_tiles(CUDA, overlap, inputs) == []


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_narrowed():
    kernels = select("triton", CUDA)
    assert settle(kernels, CUDA) == []
    assert (kernels.fixed_width, kernels.note, kernels.tile) == (None, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *product(
            ["float32", "bfloat16", "q8", "int8"],
            [(576, 576), (6144, 4096), (4096, 14336)],
        ),
        # 160 inputs are one step of some tiles and several of others. (20, 33) is a step of all of them.
        *product(
            ["float32", "bfloat16", "int8"], [(50, 1000), (72, 160), (20, 33)]
        ),  # the eight bits of q8 come in groups of 32
    ],
    ids=str,
)
def test_on_a_gpu_linears_are_right_and_mind_no_neighbour(normal, shape, kind):
    kernels = select("triton", CUDA)
    x, bias, residual = (normal(*size).to(CUDA) for size in ((600, shape[1]), shape[:1], (600, shape[0])))
    linear, weight = packed(kernels, kind, normal(*shape).to(CUDA), bias)
    exact = x.to(linear.input_dtype).double() @ weight.double().T + bias + residual
    whole = linear(x, residual)
    torch.testing.assert_close(whole.double(), exact, atol=3e-5 * shape[1] ** 0.5 * float(exact.std()), rtol=1e-4)
    for width in WIDTHS:
        for start in (0, 600 - width):
            part = slice(start, start + width)
            assert torch.equal(linear(x[part], residual[part]), whole[part]), width
    for activation, gate in (("silu", kernels.silu_mul), ("gelu_tanh", kernels.gelu_mul)):
        gated = linear.gated(x, activation)
        torch.testing.assert_close(gated, gate(linear(x)), atol=1e-5 * float(gated.abs().max()), rtol=1e-5)
        for width in WIDTHS:
            assert torch.equal(linear.gated(x[:width], activation), gated[:width]), width
    keyed = (torch.tensor([0.0, 1.0, 0.5], device=CUDA).repeat(200), *(torch.arange(600, device=CUDA),) * 3)
    keyed = (*keyed[:2], *(numbers.int() for numbers in keyed[2:]))
    for width in WIDTHS:
        part = [numbers[:width] for numbers in keyed]
        assert torch.equal(linear.draw(x[:width], *part), kernels.draw(linear(x[:width]), *part)), width
    ids = torch.tensor([3, 0, 17], device=CUDA)
    assert torch.equal(linear.rows(ids)(x[:5]), linear(x[:5])[:, ids])
