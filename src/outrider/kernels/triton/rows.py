"""Verbs of one row in Triton: norm, gates, rotation with the write of keys and values, rows of the embedding.

One program takes a row, or a head or a stretch of it, so that nothing it does depends on other rows. A result may be
written rounded, where `out` is of a narrower type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.packing import GROUP
from outrider.kernels.triton.launch import UNFUSED, begin, launch_options, on_device, release

STRETCH = 1024
"""Numbers of a row that one program of a gate or a lookup takes."""
NUMBERS_A_WARP = 512


def norm_rows(x: Tensor, weight: Tensor, eps: float, out: Tensor | None, overlap: bool) -> Tensor:
    """x: (T, H) float32, weight: (H,) float32 -> (T, H); see `Kernels.rms_norm`."""
    num_rows, size = x.shape
    out = torch.empty(num_rows, size, device=x.device) if out is None else out
    if num_rows:
        padded = triton.next_power_of_2(size)
        with on_device(x.device):
            _norm[(num_rows,)](
                x,
                weight,
                out,
                x.stride(0),
                out.stride(0),
                eps,
                SIZE=size,
                PADDED=padded,
                OVERLAP=overlap,
                num_warps=min(16, max(1, padded // NUMBERS_A_WARP)),
                **launch_options(overlap),
            )
    return out


def gate_rows(gate_up: Tensor, is_gelu: bool, out: Tensor | None, overlap: bool) -> Tensor:
    """gate_up: (T, 2 * I) float32, gate first -> (T, I); see `Kernels.silu_mul` and `Kernels.gelu_mul`."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, size, device=gate_up.device) if out is None else out
    if num_rows:
        with on_device(gate_up.device):
            _gate[(num_rows, triton.cdiv(size, STRETCH))](
                gate_up,
                out,
                size,
                gate_up.stride(0),
                out.stride(0),
                STRETCH=STRETCH,
                IS_GELU=is_gelu,
                OVERLAP=overlap,
                num_warps=4,
                **launch_options(overlap),
                **UNFUSED,
            )
    return out


def rotate_rows(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    out: Tensor | None,
    overlap: bool,
) -> Tensor:
    """See `Kernels.rotate_and_write`; one program a row and head."""
    num_rows = qkv.shape[0]
    _, kv_heads, dim = k_pages.shape
    assert qkv.shape[1] == (num_heads + 2 * kv_heads) * dim
    assert k_pages.is_contiguous()
    assert v_pages.is_contiguous()
    out = torch.empty(num_rows, num_heads, dim, device=qkv.device) if out is None else out
    assert out.is_contiguous()
    half = cos.shape[1]
    if num_rows:
        with on_device(qkv.device):
            _rotate[(num_rows, num_heads + 2 * kv_heads)](
                qkv,
                cos if half else qkv,
                sin if half else qkv,
                positions,
                slots,
                k_pages,
                v_pages,
                qkv if q_norm is None else q_norm,
                qkv if k_norm is None else k_norm,
                out,
                qkv.stride(0),
                cos.stride(0),
                sin.stride(0),
                eps,
                HEADS=num_heads,
                KV_HEADS=kv_heads,
                DIM=dim,
                PADDED=triton.next_power_of_2(dim),
                HALF=half,
                NORMS_Q=q_norm is not None,
                NORMS_K=k_norm is not None,
                OVERLAP=overlap,
                num_warps=1,
                **launch_options(overlap),
            )
    return out


def lookup_rows(weight: Tensor, scales: Tensor | None, tokens: Tensor, out: Tensor | None, overlap: bool) -> Tensor:
    """weight: (N, K), scales: (N, K // 32) or (N,) of int8 weights; tokens: (T,) int64 -> (T, K) float32."""
    num_rows, size = tokens.shape[0], weight.shape[1]
    out = torch.empty(num_rows, size, device=weight.device) if out is None else out
    if num_rows:
        with on_device(weight.device):
            _lookup[(num_rows, triton.cdiv(size, STRETCH))](
                weight,
                weight if scales is None else scales,
                tokens,
                out,
                size,
                out.stride(0),
                STRETCH=STRETCH,
                GROUP=0 if scales is None else size if scales.dim() == 1 else GROUP,
                OVERLAP=overlap,
                num_warps=4,
                **launch_options(overlap),
            )
    return out


@triton.jit
def _norm(x, weight, out, x_stride, out_stride, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, PADDED)
    inside = h < SIZE
    begin(OVERLAP)
    values = tl.load(x + row * x_stride + h, mask=inside, other=0.0)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    scale = tl.load(weight + h, mask=inside, other=0.0)
    tl.store(out + row * out_stride + h, values * factor * scale, mask=inside)


@triton.jit
def _gate(
    gate_up, out, size, in_stride, out_stride, STRETCH: tl.constexpr, IS_GELU: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    inside = i < size
    begin(OVERLAP)
    gate = tl.load(gate_up + row * in_stride + i, mask=inside, other=0.0)
    up = tl.load(gate_up + row * in_stride + size + i, mask=inside, other=0.0)
    tl.store(out + row * out_stride + i, activated(gate, IS_GELU) * up, mask=inside)


@triton.jit
def activated(gate, IS_GELU: tl.constexpr):
    """silu, or gelu in its tanh form: (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    if IS_GELU:
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate *= tl.sigmoid(gate)
    return gate


@triton.jit
def _rotate(
    qkv,
    cos,
    sin,
    positions,
    slots,
    k_pages,
    v_pages,
    q_norm,
    k_norm,
    out,
    qkv_stride,
    cos_stride,
    sin_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    NORMS_Q: tl.constexpr,
    NORMS_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, PADDED)
    inside = d < DIM
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    other = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))  # the other half of each pair
    begin(OVERLAP, RELEASES=False)
    release(OVERLAP)  # attention looks at once where its keys are, which is said before the kernel that is waited for
    start = qkv + row * qkv_stride + head * DIM
    values = tl.load(start + d, mask=inside, other=0.0)
    others = tl.load(start + other, mask=inside, other=0.0)
    if NORMS_Q or NORMS_K:
        factor = tl.rsqrt(tl.sum(values * values, axis=0) / DIM + eps)
        if NORMS_Q:
            scale, across = _pair(q_norm, d, other, inside & is_q)
            values = tl.where(is_q, values * factor * scale, values)
            others = tl.where(is_q, others * factor * across, others)
        if NORMS_K:
            is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
            scale, across = _pair(k_norm, d, other, inside & is_k)
            values = tl.where(is_k, values * factor * scale, values)
            others = tl.where(is_k, others * factor * across, others)
    if HALF > 0:
        position = tl.load(positions + row).to(tl.int64)
        turns = (d < 2 * HALF) & (head < HEADS + KV_HEADS)
        angle = tl.where(d < HALF, d, d - HALF)
        c = tl.load(cos + position * cos_stride + angle, mask=turns, other=1.0)
        s = tl.load(sin + position * sin_stride + angle, mask=turns, other=0.0)
        values = tl.where(turns, values * c + others * tl.where(d < HALF, -s, s), values)
    tl.store(out + (row * HEADS + head) * DIM + d, values, mask=inside & is_q)
    slot = tl.load(slots + row).to(tl.int64)
    is_written = inside & (slot >= 0)
    at_k = (slot * KV_HEADS + head - HEADS) * DIM + d
    tl.store(k_pages + at_k, values, mask=is_written & (head >= HEADS) & (head < HEADS + KV_HEADS))
    tl.store(v_pages + at_k - KV_HEADS * DIM, values, mask=is_written & is_v)


@triton.jit
def _pair(weight, d, other, inside):
    """A norm's weights of a head, and those of the other half of each pair."""
    return tl.load(weight + d, mask=inside, other=0.0), tl.load(weight + other, mask=inside, other=0.0)


@triton.jit
def _lookup(
    weight, scales, tokens, out, size, out_stride, STRETCH: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    inside = i < size
    begin(OVERLAP)
    token = tl.load(tokens + row)
    values = tl.load(weight + token * size + i, mask=inside, other=0).to(tl.float32)
    if GROUP > 0:
        values *= tl.load(scales + token * (size // GROUP) + i // GROUP, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + i, values, mask=inside)
