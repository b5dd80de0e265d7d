"""Paged attention in Triton: one program a row and key-value head walks the row's keys in position order.

The online softmax is that of Milakov and Gimelshein (arXiv:1805.02867): blocks of keys at positions `0 .. K - 1`,
`K .. 2 K - 1`, ..., K fixed by the shape of the heads alone, merged one after the other in float32. Nothing that a
program does depends on the other rows, on where a key lies, or on how long the tables are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.base import KeyIndex
from outrider.kernels.triton.launch import on_device

MOST_PRODUCTS = 8192
"""Query-key products that a program holds at once: heads of a group x keys of a block x head size."""
MOST_KEYS, LEAST_KEYS = 32, 8


def attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    keys: KeyIndex,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """q: (T, Hq, D) float32, pages (S, Hkv, D) float32 or bfloat16 -> (T, Hq, D) float32; see `Kernels.attention`."""
    num_rows, num_heads, dim = q.shape
    kv_heads = k_pages.shape[1]
    group = num_heads // kv_heads
    out = torch.empty_like(q) if out is None else out
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert k_pages.is_contiguous()
    assert v_pages.is_contiguous()
    if not num_rows:
        return out
    padded = triton.next_power_of_2(group) * triton.next_power_of_2(dim)
    block = min(MOST_KEYS, max(LEAST_KEYS, MOST_PRODUCTS // padded))
    with on_device(q.device):
        _attend[(num_rows, kv_heads)](
            q,
            k_pages,
            v_pages,
            out,
            keys.tables,
            keys.request,
            keys.linear,
            keys.tails,
            keys.length,
            q if sinks is None else sinks,
            keys.tables.stride(0),
            keys.tails.stride(0),
            scale,
            0 if window is None else window,
            1.0 if softcap is None else softcap,
            BLOCK_SIZE=keys.block_size,
            KV_HEADS=kv_heads,
            GROUP=group,
            DIM=dim,
            GROUP_PADDED=triton.next_power_of_2(group),
            DIM_PADDED=triton.next_power_of_2(dim),
            KEYS=block,
            HAS_WINDOW=window is not None,
            HAS_CAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            num_warps=8 if padded * block > MOST_PRODUCTS else 4,
        )
    return out


# A stride or window that happens to be 1 or a multiple of 16 must not choose another program for the same row.
@triton.jit(do_not_specialize=["table_stride", "tail_stride", "window"])
def _attend(
    q,
    k_pages,
    v_pages,
    out,
    tables,
    request,
    linear,
    tails,
    length,
    sinks,
    table_stride,
    tail_stride,
    scale,
    window,
    softcap,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_keys, num_linear = tl.load(length + row), tl.load(linear + row)
    table = tables + tl.load(request + row).to(tl.int64) * table_stride
    tail = tails + row * tail_stride
    g, d = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED)
    in_head = d < DIM
    heads = (row * KV_HEADS + kv_head) * GROUP + g
    at_heads = heads[:, None] * DIM + d[None, :]
    is_head = (g < GROUP)[:, None] & in_head[None, :]
    query = tl.load(q + at_heads, mask=is_head, other=0.0)
    if HAS_SINKS:
        top = tl.load(sinks + kv_head * GROUP + g, mask=g < GROUP, other=0.0)
        total = tl.full((GROUP_PADDED,), 1.0, tl.float32)
    else:
        top = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_PADDED,), tl.float32)
    values = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
    start = num_keys * 0
    if HAS_WINDOW:
        start = tl.maximum(num_keys - window, 0) // KEYS * KEYS
    while start < num_keys:
        x = start + tl.arange(0, KEYS)
        seen = x < num_keys
        if HAS_WINDOW:
            seen = seen & (x >= num_keys - window)
        in_table = x < num_linear
        block = tl.load(table + x // BLOCK_SIZE, mask=seen & in_table, other=0)
        own = tl.load(tail + (x - num_linear), mask=seen & (x >= num_linear), other=0)
        slot = tl.where(in_table, block * BLOCK_SIZE + x % BLOCK_SIZE, own)
        at = ((slot.to(tl.int64) * KV_HEADS + kv_head) * DIM)[:, None] + d[None, :]
        is_key = seen[:, None] & in_head[None, :]
        k = tl.load(k_pages + at, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(v_pages + at, mask=is_key, other=0.0).to(tl.float32)
        scores = tl.sum(query[:, None, :] * k[None, :, :], axis=2) * scale
        if HAS_CAP:  # tanh(s) = 2 sigmoid(2 s) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        largest = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - largest[:, None])  # a block of the loop has a visible key: its largest is finite
        shrink = tl.exp(top - largest)
        total = total * shrink + tl.sum(weights, axis=1)
        values = values * shrink[:, None] + tl.sum(weights[:, :, None] * v[None, :, :], axis=1)
        top = largest
        start += KEYS
    tl.store(out + at_heads, values / tl.where(total == 0.0, 1.0, total)[:, None], mask=is_head)
