"""Batches of a level, whose tensors are used again, against those that are built anew."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.models.batch import BatchBuilder, FlatBatch, LevelBatches

CPU = torch.device("cpu")
BLOCK = 4


def what_rows_see(batch: FlatBatch) -> list[tuple[int, ...]]:
    """Token, position and slot of each row, then the slots of its keys: all that a pass reads of a batch."""
    keys, rows = batch.keys, []
    for row in range(batch.num_rows):
        table, linear, length = keys.tables[keys.request[row]], int(keys.linear[row]), int(keys.length[row])
        known = [int(table[x // BLOCK]) * BLOCK + x % BLOCK for x in range(linear)]
        own = keys.tails[row][: length - linear].tolist()
        rows.append((int(batch.tokens[row]), int(batch.positions[row]), int(batch.slots[row]), *known, *own))
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_levels_are_what_is_built_of_their_nodes(seed: int) -> None:
    """Over many trees of changing shapes, requests and lengths; nothing of a batch before shows through."""
    rng = random.Random(seed)
    levels = LevelBatches(BLOCK)
    used = set()
    for _ in range(60):
        known = [rng.randint(1, 60) for _ in range(rng.randint(1, 3))]
        tables = [[rng.randrange(99) for _ in range(-(-n // BLOCK) + rng.randint(0, 2))] for n in known]
        paths: list[tuple[int, tuple[int, ...]]] = [(number, ()) for number in range(len(known))]
        for _ in range(rng.randint(1, 11)):
            above = rng.choices(paths, k=rng.randint(1, 4))
            paths = sorted((number, (*path, rng.randrange(400))) for number, path in above)
            tokens = [rng.randrange(1000) for _ in paths]
            numbers, tails = zip(*paths, strict=True)
            linear = [known[number] for number in numbers]
            batch = levels.batch(tables, numbers, tokens, linear, tails, CPU)
            builder = BatchBuilder(BLOCK)
            for token, number, path in zip(tokens, numbers, tails, strict=True):
                builder.request(tables[number])
                builder.node(token, known[number], path)
            assert what_rows_see(batch) == what_rows_see(builder.build(CPU))
            assert batch.logit_rows is None
            used.add(batch.tokens.data_ptr())
    assert len(used) < 60
