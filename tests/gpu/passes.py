"""Passes of the shape of an 8B over random pages: lines, trees, prompts and batches, for the tests on a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cache.pages import Pages, PageSpec
from outrider.kernels.base import KeyIndex
from outrider.models.batch import BatchBuilder, FlatBatch

HEADS, KV_HEADS, DIM = 32, 8, 128
BLOCK = 16
SPARE = 128
"""Slots behind a request's known tokens, for its guesses."""


def parents_of(num_nodes: int, width: int = 3) -> list[int]:
    """A bushy tree: node i hangs off node (i - width) // width."""
    return [(node - width) // width if node >= width else -1 for node in range(num_nodes)]


def tables(num_requests: int, context: int) -> list[list[int]]:
    """Shuffled blocks, none of them the trash block, none in two tables."""
    blocks = -(-(context + SPARE) // BLOCK)
    order = torch.randperm(num_requests * blocks, generator=torch.Generator().manual_seed(1)) + 1
    return order.view(num_requests, blocks).tolist()


def num_slots(num_requests: int, context: int) -> int:
    return (num_requests * -(-(context + SPARE) // BLOCK) + 1) * BLOCK


def tree_pass(context: int, num_nodes: int, device: torch.device, parents: Sequence[int] | None = None) -> FlatBatch:
    """One request: its last known token at position `context - 1`, and a tree behind it."""
    (table,) = tables(1, context)
    builder = BatchBuilder(BLOCK)
    builder.request(table)
    builder.line(context - 1, [1], 1)
    if num_nodes:
        slots = [table[x // BLOCK] * BLOCK + x % BLOCK for x in range(context, context + num_nodes)]
        builder.tree(context, [1] * num_nodes, parents_of(num_nodes) if parents is None else parents, slots)
    return builder.build(device)


def prompt_pass(start: int, num_rows: int, device: torch.device) -> FlatBatch:
    """One request: `num_rows` tokens of its prompt from position `start` on."""
    (table,) = tables(1, start + num_rows)
    builder = BatchBuilder(BLOCK)
    builder.request(table)
    builder.line(start, [1] * num_rows, 1)
    return builder.build(device)


def batch_pass(context: int, num_requests: int, device: torch.device) -> FlatBatch:
    """One row each of so many requests."""
    builder = BatchBuilder(BLOCK)
    for table in tables(num_requests, context):
        builder.request(table)
        builder.line(context - 1, [1], 1)
    return builder.build(device)


def random_pass(rng: random.Random, longest: int, num_slots: int, device: torch.device) -> KeyIndex:
    """Up to three requests, each with known tokens and perhaps a tree, and perhaps rows that only fill the pass."""
    blocks = list(range(1, num_slots // BLOCK))
    rng.shuffle(blocks)
    builder = BatchBuilder(BLOCK)
    for _ in range(rng.choice([1, 1, 2, 3])):
        known = rng.choice([1, BLOCK, longest, rng.randrange(1, longest)])
        table = [blocks.pop() for _ in range((known + 40) // BLOCK + 1)]
        builder.request(table)
        num_rows = min(known, rng.choice([1, 1, 2, 9]))
        builder.line(known - num_rows, [1] * num_rows, 1)
        num_nodes = rng.choice([0, 0, 3, 12])
        parents = [rng.randrange(-1, node) if node else -1 for node in range(num_nodes)]
        slots = [table[x // BLOCK] * BLOCK + x % BLOCK for x in range(known, known + num_nodes)]
        builder.tree(known, [1] * num_nodes, parents, slots)
    keys = builder.build(device).keys
    filling = rng.choice([0, 0, 3])
    nothing = keys.length.new_zeros(filling)
    tails = nothing[:, None].repeat(1, keys.tails.shape[1])
    pairs = ((keys.request, nothing), (keys.linear, nothing), (keys.tails, tails), (keys.length, nothing + 1))
    return KeyIndex(keys.tables, *(torch.cat(pair) for pair in pairs), BLOCK)


def random_pages(num_layers: int, slots: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Pages:
    pages = Pages([PageSpec(KV_HEADS, DIM, DIM)] * num_layers, slots, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for page in (*pages.keys, *pages.values):
        page.normal_(generator=generator)
    return pages


def queries(num_rows: int, device: torch.device) -> Tensor:
    return torch.randn(num_rows, HEADS, DIM, device=device, generator=torch.Generator(device).manual_seed(2))


def part_of(keys: KeyIndex, rows: list[int]) -> KeyIndex:
    """These rows alone."""
    return KeyIndex(
        keys.tables, keys.request[rows], keys.linear[rows], keys.tails[rows], keys.length[rows], keys.block_size
    )
