"""What one part of the key axis says to some queries, and how what two say is folded into one.

Scores are kept in units of log 2 (by the factor log2 e), so that weights are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_part(
    query,
    k_pages,
    v_pages,
    path,
    part,
    lengths,
    numbers,
    SHAPE: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Of one part: the largest score (M,), the total of the weights (M,), and the values by weight (M, D)."""
    window, scale, softcap = numbers
    d = tl.arange(0, SHAPE[5])
    x = part * SHAPE[6] + tl.arange(0, SHAPE[6])
    slots = _slots(path, x, SHAPE[0], FLAGS[5])
    at = (slots.to(tl.int64) if FLAGS[4] else slots) * (SHAPE[1] * SHAPE[4])
    k_pages += tl.program_id(0) * SHAPE[4]
    v_pages += tl.program_id(0) * SHAPE[4]
    is_key = x < path[3]
    if SHAPE[4] == SHAPE[5]:
        k = tl.load(k_pages + (at[None, :] + d[:, None]), mask=is_key[None, :], other=0.0)
        v = tl.load(v_pages + (at[:, None] + d[None, :]), mask=is_key[:, None], other=0.0)
    else:
        inside = d < SHAPE[4]
        k = tl.load(k_pages + (at[None, :] + d[:, None]), mask=is_key[None, :] & inside[:, None], other=0.0)
        v = tl.load(v_pages + (at[:, None] + d[None, :]), mask=is_key[:, None] & inside[None, :], other=0.0)
    scores = _product(query, k, FLAGS) * scale
    if FLAGS[1]:  # tanh(s) = 2 sigmoid(2 s) - 1
        scores = (softcap * 1.4426950408889634) * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    seen = x[None, :] < lengths[:, None]
    if FLAGS[0]:
        seen = seen & (x[None, :] >= lengths[:, None] - window)
    if FLAGS[6]:
        seen = seen & ((x[None, :] > 0) | (lengths[:, None] == 1))
    scores = tl.where(seen, scores, float("-inf"))
    largest = tl.max(scores, axis=1)
    weights = tl.exp2(scores - tl.where(largest == float("-inf"), 0.0, largest)[:, None]).to(v.dtype)
    ones = tl.full((SHAPE[6], 16), 1.0, tl.float32).to(v.dtype)
    return largest, tl.max(_product(weights, ones, FLAGS), axis=1), _product(weights, v, FLAGS)


@triton.jit
def _slots(path, x, BLOCK_SIZE: tl.constexpr, IS_SHARED: tl.constexpr):
    """Where the keys at positions x lie; anywhere from the last one on."""
    table, tail, known, num_keys = path
    in_table = x < tl.minimum(known, num_keys)
    slots = tl.load(table + x // BLOCK_SIZE, mask=in_table, other=0) * BLOCK_SIZE + x % BLOCK_SIZE
    if not IS_SHARED:
        slots = tl.where(in_table, slots, tl.load(tail + (x - known), mask=(x >= known) & (x < num_keys), other=0))
    return slots


@triton.jit
def _product(a, b, FLAGS: tl.constexpr):
    """a (M, K) times b (K, N) of one type, summed over K in order, in float32."""
    if FLAGS[3]:  # the interpreter multiplies the bits of bfloat16 as if they were integers
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
def nothing(TILE: tl.constexpr, DIM: tl.constexpr):
    """What no key says."""
    return tl.full((TILE,), float("-inf"), tl.float32), tl.zeros((TILE,), tl.float32), tl.zeros((TILE, DIM), tl.float32)


@triton.jit
def fold(said, other):
    """What two say together: (largest score, total, values) each, of as many queries; -inf is nothing."""
    larger = tl.maximum(said[0], other[0])
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    shrink, grow = tl.exp2(said[0] - safe), tl.exp2(other[0] - safe)
    total = tl.fma(said[1], shrink, other[1] * grow)
    return larger, total, tl.fma(said[2], shrink[:, None], other[2] * grow[:, None])
