"""The match rule's walk and the compaction of its path in Triton: a program a request, nothing returns to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.tree import PageTable, Trees, Walks
from outrider.kernels.triton.launch import on_device

MOVED = 4096
"""Words that a program holds at once."""


def walk(draws: Tensor, trees: Trees) -> Walks:
    """draws: (M,) int64 -> the accepted paths; see `Kernels.walk`."""
    num_requests, device = trees.starts.shape[0], draws.device
    assert all(t.is_contiguous() for t in (draws, trees.tokens, trees.parents, trees.first, trees.starts))
    counts = torch.empty(num_requests, dtype=torch.int32, device=device)
    paths = torch.empty(num_requests, trees.depth, dtype=torch.int32, device=device)
    said = torch.empty(num_requests, trees.depth + 1, dtype=torch.int64, device=device)
    if num_requests:
        with on_device(device):
            _walk[(num_requests,)](
                draws,
                trees.tokens,
                trees.parents,
                trees.first,
                trees.starts,
                counts,
                paths,
                said,
                trees.depth,
                NODES=triton.next_power_of_2(max(1, trees.most_nodes)),
                PLACES=triton.next_power_of_2(trees.depth + 1),
                num_warps=1 if trees.most_nodes <= 256 else 4,
            )
    return Walks(counts, paths, said)


@triton.jit(
    do_not_specialize=["depth"], do_not_specialize_on_alignment=["draws", "tokens", "parents", "first", "starts"]
)
def _walk(draws, tokens, parents, first, starts, counts, paths, said, depth, NODES: tl.constexpr, PLACES: tl.constexpr):
    """Step down while a child carries the drawn token: as `sampling.verify.verify_match`, then its last check."""
    request = tl.program_id(0)
    base, node, place = tl.load(first + request), tl.arange(0, NODES), tl.arange(0, PLACES)
    is_node = node < tl.load(first + request + 1) - base
    parent = tl.load(parents + base + node, mask=is_node, other=-2)
    token = tl.load(tokens + base + node, mask=is_node, other=-2)
    drawn = draws + tl.load(starts + request)
    last = tl.load(drawn)
    path, says = tl.full((PLACES,), -1, tl.int32), tl.where(place == 0, last, -1)
    count, child = base * 0, tl.max(tl.where((parent == -1) & (token == last), node, -1))
    while child >= 0:
        last = tl.load(drawn + 1 + child)
        path = tl.where(place == count, child, path)
        count += 1
        says = tl.where(place == count, last, says)
        child = tl.max(tl.where((parent == child) & (token == last), node, -1))
    if (last < 0) & (count > 0):  # a row without a law is delivered by the next cycle, whose root it is
        count -= 1
        path = tl.where(place == count, -1, path)
    tl.store(counts + request, count)
    tl.store(paths + request * depth + place, path, mask=place < depth)
    tl.store(said + request * (depth + 1) + place, says, mask=place <= depth)


def compact(table: PageTable, slots: Tensor, trees: Trees, walks: Walks) -> None:
    """Move the keys and values of accepted paths into line, in all layers by one launch; see `Kernels.compact`."""
    num_requests = trees.starts.shape[0]
    assert all(t.is_contiguous() for t in (slots, trees.first, walks.counts, walks.paths))
    if num_requests and trees.depth:
        places = triton.next_power_of_2(trees.depth)
        with on_device(slots.device):
            _compact[(num_requests, len(table.pages))](
                table.addresses,
                table.words,
                slots,
                trees.first,
                walks.counts,
                walks.paths,
                trees.depth,
                PLACES=places,
                WORDS=min(triton.next_power_of_2(table.most_words), max(32, MOVED // places)),
                WORD_BYTES=table.word_bytes,
            )


@triton.jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=["slots", "first"])
def _compact(
    addresses,
    words,
    slots,
    first,
    counts,
    paths,
    depth,
    PLACES: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_BYTES: tl.constexpr,
):
    """One request in one layer's keys or values: all that moves is read before anything is written."""
    request, layer = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, PLACES)
    node = tl.load(paths + request * depth + place, mask=place < depth, other=-1)
    moves = (place < tl.load(counts + request)) & (node != place)
    if tl.max(moves.to(tl.int32)) != 0:
        base = tl.load(first + request)
        num_words = tl.load(words + layer)
        source = tl.load(slots + base + node, mask=moves, other=0).to(tl.int64) * num_words
        target = tl.load(slots + base + place, mask=moves, other=0).to(tl.int64) * num_words
        if WORD_BYTES == 4:
            pages = tl.load(addresses + layer).to(tl.pointer_type(tl.int32))
        else:
            pages = tl.load(addresses + layer).to(tl.pointer_type(tl.int16))
        start = num_words * 0
        while start < num_words:
            word = start + tl.arange(0, WORDS)
            mask = moves[:, None] & (word < num_words)[None, :]
            moved = tl.load(pages + source[:, None] + word[None, :], mask=mask)
            tl.debug_barrier()
            tl.store(pages + target[:, None] + word[None, :], moved, mask=mask)
            start += WORDS
