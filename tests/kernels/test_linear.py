"""Linears against float64, their packed forms against exact arithmetic, and rows that mind no neighbour."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import KernelError
from outrider.kernels.packing import quantise, quantise_outputs

SHAPES = [(72, 96), (16, 32), (5, 64), (193, 320)]
WIDTHS = [1, 2, 3, 7, 8, 9, 13, 17]


def quantised(kind: str, shape: tuple[int, int]):
    generator = torch.Generator().manual_seed(1)
    groups = (shape[0], shape[1] // 32)
    scales, minima = (torch.randn(*groups, generator=generator).half().float() for _ in range(2))
    if kind == "q4":
        return torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8), scales, minima
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8), scales, None


def dequantised(quants, scales, minima):
    """The weights that the file format defines, in the arithmetic of its own readers."""
    weight = quants.float().unflatten(1, (-1, 32)) * scales.unsqueeze(2)
    return (weight if minima is None else weight + minima.unsqueeze(2)).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [*SHAPES, (20, 33), (3, 7)])
def test_float_linears_equal_float64(kernels, normal, shape, dtype):
    weight, bias, x = normal(*shape).to(dtype), normal(shape[0]), normal(19, shape[1])
    residual = normal(19, shape[0])
    linear = kernels.pack(weight, bias)
    exact = x.to(linear.input_dtype).double() @ weight.double().T + bias + residual
    y = linear(x, residual)
    torch.testing.assert_close(y.double(), exact, atol=1e-5 * shape[1] ** 0.5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["q4", "q8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_linears_equal_exact_arithmetic_on_rounded_activations(native, normal, shape, kind):
    """Activations that int8 holds exactly: whole numbers whose extremes in every sixteen are -127 and 127."""
    x = (normal(9, shape[1]) * 40).round().clamp(-127, 127)
    x[:, ::16], x[:, 5::16] = 127, -127
    parts = quantised(kind, shape)
    exact = x.double() @ dequantised(*parts).double().T
    y = native.pack_quantised(kind, *parts)(x)
    torch.testing.assert_close(y.double(), exact, atol=1e-4 * float(exact.abs().max()) / 10, rtol=1e-6)


@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_packed_linears_stay_within_the_rounding_of_activations(kernels, normal, kind):
    """The error is at most half a step of the coarsest activation times the weights' magnitudes."""
    x, parts = normal(11, 320) * normal(11, 320).exp(), quantised(kind, (72, 320))
    weight = dequantised(*parts).double()
    halves = x.unflatten(1, (-1, 16))
    step = (halves.amax(2) - halves.amin(2)) / 254
    bound = step.double().repeat_interleave(16, dim=1) / 2 @ weight.abs().T
    error = (kernels.pack_quantised(kind, *parts)(x).double() - x.double() @ weight.T).abs()
    assert (error <= bound * 1.001 + 1e-3).all()
    assert error.max() > 1e-3, "no rounding at all would mean that nothing was tried"


@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_native_agrees_with_its_twin(native, plain, normal, kind):
    x, parts = normal(17, 320), quantised(kind, (193, 320))
    ours, twin = (k.pack_quantised(kind, *parts)(x) for k in (native, plain))
    torch.testing.assert_close(ours, twin, atol=2e-6 * float(twin.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q4", "q8"])
def test_a_row_has_the_same_bits_in_any_company(kernels, normal, kind):
    shape = (193, 160)
    if kind in ("q4", "q8"):
        linear = kernels.pack_quantised(kind, *quantised(kind, shape))
    else:
        linear = kernels.pack(normal(*shape).to(getattr(torch, kind)))
    x = normal(64, shape[1])
    whole = linear(x)
    for width in (1, 8, 17) if kernels.name == "triton" else WIDTHS:  # its interpreter takes its time
        for start in (0, 5, 64 - width):
            assert torch.equal(linear(x[start : start + width]), whole[start : start + width])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q4", "q8"])
def test_lookup_gives_the_files_own_weights(kernels, normal, kind):
    tokens = torch.tensor([0, 71, 15, 16, 3, 3])
    if kind in ("q4", "q8"):
        parts = quantised(kind, (72, 96))
        linear, rows = kernels.pack_quantised(kind, *parts), dequantised(*parts)
    else:
        rows = normal(72, 96).to(getattr(torch, kind))
        linear = kernels.pack(rows)
    assert torch.equal(linear.lookup(tokens), rows[tokens].float())


def test_nan_and_infinity_reach_the_result_of_their_row_alone(kernels, normal):
    parts = quantised("q4", (16, 64))
    linear = kernels.pack_quantised("q4", *parts)
    x = normal(3, 64)
    clean = linear(x)
    for bad in (torch.nan, torch.inf):
        dirty = x.clone()
        dirty[1, 40] = bad
        y = linear(dirty)
        assert not y[1].isfinite().any()
        assert torch.equal(y[[0, 2]], clean[[0, 2]])


def test_what_cannot_be_packed_without_loss_is_refused(native):
    quants, scales, minima = quantised("q4", (16, 64))
    with pytest.raises(KernelError, match="half-precision"):
        native.pack_quantised("q4", quants, scales + 1e-6, minima)
    with pytest.raises(KernelError, match="groups of 32"):
        native.pack_quantised("q4", quants[:, :40], scales, minima)
    with pytest.raises(KernelError, match="float64"):
        native.pack(torch.zeros(4, 4, dtype=torch.float64))


def test_four_bits_stay_four_bits(native):
    linear = native.pack_quantised("q4", *quantised("q4", (64, 320)))
    assert linear.nbytes == 64 * 320 * 5 // 8


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q4", "q8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_some_rows_of_a_linear_are_those_rows_bit_for_bit(kernels, normal, shape, kind):
    """Also with biases, in any order, across tiles of sixteen."""
    bias = normal(shape[0])
    if kind in ("q4", "q8"):
        whole = kernels.pack_quantised(kind, *quantised(kind, shape), bias)
    else:
        whole = kernels.pack(normal(*shape).to(getattr(torch, kind)), bias)
    ids = torch.randperm(shape[0], generator=torch.Generator().manual_seed(2))[: max(1, shape[0] * 2 // 3)]
    some, x = whole.rows(ids), normal(3, shape[1])
    assert (some.kind, some.out_features, some.in_features) == (kind, len(ids), shape[1])
    if kernels.name == "native":
        assert torch.equal(some(x), whole(x)[:, ids])
    torch.testing.assert_close(some(x), whole(x)[:, ids])  # a library may sum other shapes in another order
    assert torch.equal(some.lookup(torch.arange(len(ids))), whole.lookup(ids))


def test_weights_of_one_scale_an_output_meet_inputs_of_16_bits(kernels, normal):
    """Right, the same in any company, looked up exactly, by the row; where there is no such product it is refused."""
    quants, scales = quantise_outputs(normal(70, 96) * normal(70, 1).exp())
    bias, residual, x = normal(70), normal(19, 70), normal(19, 96)
    if kernels.name == "native":
        with pytest.raises(KernelError, match="GPU"):
            kernels.pack_quantised("int8", quants, scales, None)
        return
    linear = kernels.pack_quantised("int8", quants, scales, None, bias)
    weight = quants.double() * scales.double()[:, None]
    y = linear(x, residual)
    exact = x.bfloat16().double() @ weight.T + bias + residual
    torch.testing.assert_close(y.double(), exact, atol=1e-5 * float(weight.abs().max()) * 96**0.5, rtol=1e-5)
    assert torch.equal(linear(x.bfloat16().float(), residual), y)
    for width in WIDTHS:
        assert torch.equal(linear(x[:width], residual[:width]), y[:width])
    ids = torch.tensor([3, 69, 3, 0])
    assert torch.equal(linear.lookup(ids), quants[ids].float() * scales[ids][:, None])
    torch.testing.assert_close(linear.rows(ids)(x), linear(x)[:, ids])
    assert (linear.kind, linear.nbytes) == ("int8", 70 * 96 + 70 * 4 + 70 * 4)


def test_rounding_to_one_scale_an_output_errs_by_half_a_step(normal):
    weight = normal(40, 96) * normal(40, 1).exp()
    weight[3] = 0.0
    quants, scales = quantise_outputs(weight)
    error = (quants.float() * scales[:, None] - weight).abs().amax(1)
    assert (error <= weight.abs().amax(1) * (0.5 / 127 + 1e-6)).all()
    assert error.max() > 0


@pytest.mark.parametrize(("kind", "steps"), [("q8", 254), ("q4", 15)])
def test_rounding_weights_errs_by_half_a_step(normal, kind, steps):
    weight = normal(40, 96) * normal(40, 96).exp()
    weight[3] = 0.0
    groups = weight.unflatten(1, (-1, 32))
    reach = 2 * groups.abs().amax(2) if kind == "q8" else groups.amax(2) - groups.amin(2)
    error = (dequantised(*quantise(weight, kind)) - weight).abs().unflatten(1, (-1, 32)).amax(2)
    # Scales and minima are halves: each is off by up to 2^-11 of itself, in every one of the steps.
    assert (error <= reach * (0.5 / steps + 2**-11) + groups.abs().amax(2) * 2**-11 + 1e-6).all()
    with pytest.raises(KernelError, match="whole groups of 32"):
        quantise(normal(4, 40), kind)
