"""The kernel of a linear: a tile of outputs x rows by one loop over the inputs in order, and what is done last."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.triton.launch import release, wait
from outrider.kernels.triton.rows import activated


# How many rows share a call must not choose another program for the same row.
@triton.jit(do_not_specialize=["num_rows", "bytes_ahead"])
def multiply(
    x,
    weight,
    scales,
    bias,
    residual,
    out,
    num_rows,
    num_outputs,
    x_stride,
    residual_stride,
    out_stride,
    bytes_ahead,
    SHAPE: tl.constexpr,
    FLAGS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_LATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out: (T, N), or (T, N / 2) of gates and their partners; the other arguments as `products` takes them."""
    # Neighbouring programs share weights, which then come from memory once.
    OUTPUTS: tl.constexpr = SHAPE[1]
    ROWS: tl.constexpr = SHAPE[2]
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = t < num_rows, n < num_outputs
    own = tl.minimum(n, num_outputs - 1).to(tl.int64)  # outputs beyond the last are computed twice, and not stored
    if IS_GATED:  # a gate and its partner in turns
        own = own // 2 + own % 2 * (num_outputs // 2)
    sums = products(x, weight, scales, bias, t, own, is_row, x_stride, bytes_ahead, SHAPE, FLAGS, IS_LATE, OVERLAP)
    if IS_GATED:
        pairs = tl.permute(tl.reshape(sums, (OUTPUTS // 2, 2, ROWS)), (0, 2, 1))
        gate, up = tl.split(pairs)
        sums = activated(gate, IS_GELU) * up
        n = tl.program_id(1) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        is_output = n < num_outputs // 2
    at = t.to(tl.int64)[None, :]
    is_inside = is_output[:, None] & is_row[None, :]
    if HAS_RESIDUAL:
        sums += tl.load(residual + at * residual_stride + n[:, None], mask=is_inside, other=0.0)
    tl.store(out + at * out_stride + n[:, None], sums, mask=is_inside)


@triton.jit
def products(
    x,
    weight,
    scales,
    bias,
    t,
    own,
    is_row,
    x_stride,
    bytes_ahead,
    SHAPE: tl.constexpr,
    FLAGS: tl.constexpr,
    IS_LATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The outputs `own` of the rows `t`, with their bias: (OUTPUTS, ROWS) float32.

    SHAPE: inputs in all; outputs, rows and inputs of a tile; weights that share a scale, 0 where none do or all of an
    output do. FLAGS: whether there is a bias, a scale for each output, are weights float32, is this the interpreter.
    bytes_ahead: of every output's weights, asked for before the inputs are there, as nobody writes those.
    IS_LATE: the successor is let go when the sums are there. Its programs take what room is left as soon as they may:
    beside half of a kernel's programs some multiprocessors would get two of them, and some none.
    """
    NUM_INPUTS: tl.constexpr = SHAPE[0]
    OUTPUTS: tl.constexpr = SHAPE[1]
    ROWS: tl.constexpr = SHAPE[2]
    INPUTS: tl.constexpr = SHAPE[3]
    GROUP: tl.constexpr = SHAPE[4]
    k = tl.arange(0, INPUTS)
    weight_at = weight + own[:, None] * NUM_INPUTS + k[None, :]
    x_at = x + t.to(tl.int64)[:, None] * x_stride + k[None, :]
    release(OVERLAP and not IS_LATE)
    if OVERLAP:
        _prefetch(weight + own * NUM_INPUTS, bytes_ahead)
    wait(OVERLAP)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if NUM_INPUTS <= INPUTS:
        # A product alone that starts from what the compiler knows to be zero would start from the residual instead,
        # and round otherwise than in tiles of fewer inputs: it must not know. (No t is negative.)
        sums += tl.where(t < 0, 1.0, 0.0)[None, :]
    for start in range(0, NUM_INPUTS, INPUTS):
        if NUM_INPUTS % INPUTS == 0:
            w = tl.load(weight_at)
            rows = tl.load(x_at, mask=is_row[:, None], other=0.0)
        else:
            inside = k < NUM_INPUTS - start
            w = tl.load(weight_at, mask=inside[None, :], other=0)
            rows = tl.load(x_at, mask=is_row[:, None] & inside[None, :], other=0.0)
        if GROUP > 0:
            group = start // GROUP + tl.arange(0, INPUTS // GROUP)
            scales_at = scales + own[:, None] * (NUM_INPUTS // GROUP) + group[None, :]
            scale = tl.load(scales_at, mask=(group < NUM_INPUTS // GROUP)[None, :], other=0.0)
            grouped = tl.reshape(w.to(tl.float32), (OUTPUTS, INPUTS // GROUP, GROUP))
            w = tl.reshape(grouped * scale.to(tl.float32)[:, :, None], (OUTPUTS, INPUTS)).to(tl.bfloat16)
        elif FLAGS[1] and not FLAGS[3]:
            w = w.to(tl.bfloat16)  # 8 bits are exact in it
        if FLAGS[3]:  # products of bfloat16 are exact in float32
            sums = tl.dot(w.to(tl.float32), tl.trans(rows.to(tl.float32)), sums, input_precision="ieee")
        elif FLAGS[2]:
            sums = tl.dot(w, tl.trans(rows), sums, input_precision="ieee")
        else:
            sums = tl.dot(w, tl.trans(rows), sums)
        weight_at += INPUTS
        x_at += INPUTS
    release(OVERLAP and IS_LATE)
    if FLAGS[1] and FLAGS[0]:
        sums = tl.fma(sums, tl.load(scales + own)[:, None], tl.load(bias + own)[:, None])
    elif FLAGS[1]:
        sums *= tl.load(scales + own)[:, None]
    elif FLAGS[0]:
        sums += tl.load(bias + own)[:, None]
    return sums


@triton.jit
def _prefetch(first, num_bytes):
    """Ask for the first bytes of every row at `first`, line by line of memory, without waiting for them."""
    bytes_at = first.to(tl.int64)
    for ahead in range(0, num_bytes, 128):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [bytes_at + ahead],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
