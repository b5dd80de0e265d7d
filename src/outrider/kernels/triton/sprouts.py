"""Sprouting in Triton: a program a request weighs the children of its level and takes the best of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.places import NOTHING
from outrider.kernels.sprouts import Fits, Frontier, Ranked, Sprouts
from outrider.kernels.triton.launch import on_device

_NUMBERS = ["num", "width", "num_ranked", "row_stride", "depth", "path_stride", "path_step"]
_ARRAYS = ["logits", "scores", "columns", "masses", "trust", "heat", "kept", "above_tokens", "above_weights", "paths"]


def sprout(
    ranked: Ranked, above: Frontier, width: int, heat: Tensor, fits: Fits, kept: Tensor | None = None
) -> Sprouts:
    """See `Kernels.sprout`."""
    size, num = above.tokens.shape
    depth, device = above.paths.shape[2], above.tokens.device
    count = num * width
    tokens = torch.empty(size, count, dtype=torch.int64, device=device)
    weights = torch.empty(size, count, device=device)
    best_tokens, chosen, origins = torch.empty(3, size, width, dtype=torch.int64, device=device)
    best_weights = torch.empty(size, width, device=device)
    paths = torch.empty(size, width, depth + 1, dtype=torch.int64, device=device)
    assert above.tokens.is_contiguous()
    assert above.weights.is_contiguous()
    assert depth < 2 or above.paths.stride(2) == 1
    with on_device(device):
        _sprout[(size,)](
            ranked.logits,
            ranked.scores,
            ranked.columns,
            ranked.masses,
            ranked.masses if ranked.trust is None else ranked.trust,
            heat,
            above.tokens if kept is None else kept,
            above.tokens,
            above.weights,
            above.paths,
            tokens,
            weights,
            best_tokens,
            best_weights,
            chosen,
            origins,
            paths,
            *(num, width, ranked.columns.shape[1], ranked.logits.stride(0), depth, *above.paths.stride()[:2]),
            *fits.leader,
            *fits.follower,
            fits.wide,
            NONE=NOTHING,
            HAS_TRUST=ranked.trust is not None,
            HAS_KEPT=kept is not None,
            CHILDREN=triton.next_power_of_2(count),
            DEPTH=triton.next_power_of_2(depth + 1),
            num_warps=1 if count <= 64 else 4,
        )
    return Sprouts(tokens, weights, Frontier(best_tokens, best_weights, paths, origins.flatten(), chosen))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def _sprout(
    logits,
    scores,
    columns,
    masses,
    trust,
    heat,
    kept,
    above_tokens,
    above_weights,
    paths,
    tokens,
    weights,
    best_tokens,
    best_weights,
    chosen,
    origins,
    best_paths,
    num,
    width,
    num_ranked,
    row_stride,
    depth,
    path_stride,
    path_step,
    lead_constant,
    lead_gap,
    lead_log,
    follow_constant,
    follow_gap,
    follow_log,
    wide,
    NONE: tl.constexpr,
    HAS_TRUST: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    CHILDREN: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Child c of a request is the one of rank c % width below its node c // width."""
    request = tl.program_id(0)
    child = tl.arange(0, CHILDREN)
    count = num * width
    is_child = child < count
    node, rank = child // width, child % width
    row = (request * num + node).to(tl.int64)
    is_ranked = is_child & (rank < num_ranked)
    column = tl.load(columns + row * num_ranked + rank, mask=is_ranked, other=-1)
    own = tl.load(scores + row * num_ranked + rank, mask=is_ranked, other=float("-inf"))
    leader = tl.load(scores + row * num_ranked, mask=is_child, other=0.0)
    second = tl.load(scores + row * num_ranked + 1, mask=is_child & (num_ranked > 1), other=float("-inf"))
    gap = (leader - tl.where(rank == 0, second, own)).to(tl.float32)
    gap = tl.where(gap < wide, gap, wide)  # NaN is not below it
    mass = tl.load(masses + row, mask=is_child, other=0.0).to(tl.float32)
    logit = tl.load(logits + row * row_stride + tl.maximum(column, 0), mask=is_child, other=0.0)
    log = logit - mass
    lead = lead_constant + lead_gap * gap + lead_log * log
    follow = follow_constant + follow_gap * gap + follow_log * log
    noisy = 1.0 / (1.0 + tl.exp(-tl.where(rank == 0, lead, follow)))
    chance = tl.where(tl.load(heat + request) > 0, noisy, tl.exp(tl.minimum(log, 0.0)))
    chance = tl.where((chance == chance) & (column >= 0), chance, 0.0)
    if HAS_TRUST:
        chance *= tl.load(trust + row, mask=is_child, other=0.0)
    weight = tl.load(above_weights + row, mask=is_child, other=0.0) * chance
    parent = tl.load(above_tokens + row, mask=is_child, other=NONE)
    token = tl.maximum(column, 0)
    if HAS_KEPT:
        token = tl.load(kept + token, mask=is_child, other=0)
    token = tl.where((column >= 0) & (parent >= 0), token, NONE)
    tl.store(tokens + request * count + child, token, mask=is_child)
    tl.store(weights + request * count + child, weight, mask=is_child)
    left = tl.where(is_child, weight, -1.0)
    step = tl.arange(0, DEPTH)
    taken = 0
    while taken < width:
        top = tl.max(left)
        first = tl.min(tl.where(left == top, child, CHILDREN))
        is_first = child == first
        at = request * width + taken
        from_node = first // width
        tl.store(best_tokens + at, tl.max(tl.where(is_first, token, NONE)))
        tl.store(best_weights + at, top)
        tl.store(chosen + at, first.to(tl.int64))
        tl.store(origins + at, (request * num + from_node).to(tl.int64))
        path = tl.load(paths + request * path_stride + from_node * path_step + step, mask=step < depth, other=0)
        path = tl.where(step == depth, depth * width + taken, path)
        tl.store(best_paths + at * (depth + 1) + step, path, mask=step <= depth)
        left = tl.where(is_first, -2.0, left)
        taken += 1
