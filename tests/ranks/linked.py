"""What ranks of a job of the tests exchange through memory of each other's: files, and Triton's interpreter on each."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

from outrider.models.ranks.group import Ranks

BLOCK, ROOM, TURNS = 32, 96, 24


def exchanges(folder: Path, ranks: Ranks) -> dict[str, list[bool]]:
    """By kind, whether exchanges of many sizes, one after the other, gave what they should on this rank, which now and
    then is late.
    """
    from outrider.kernels.triton import exchange

    exchange.BLOCK, exchange.ROOM = BLOCK, ROOM
    shape = 2, ranks.size, ROOM
    inboxes = tuple(
        torch.from_file(str(folder / f"inbox-{peer}"), True, 2 * ranks.size * ROOM, dtype=torch.int64).view(shape)
        for peer in range(ranks.size)
    )
    ranks.agree(None)
    ranks._exchange = exchange.Exchange(ranks.rank, inboxes, overlap=False)
    found: dict[str, list[bool]] = {"add": [], "columns": [], "take": []}
    order, own = random.Random(0), random.Random(ranks.rank)
    for turn in range(TURNS):
        kind, rows, count = order.choice(list(found)), order.randint(1, 5), order.randint(1, 60)
        generator = torch.Generator().manual_seed(turn)
        all_parts = torch.randn(ranks.size, rows, count, generator=generator)
        part = all_parts[ranks.rank].contiguous()
        if own.random() < 0.3:
            time.sleep(0.05)
        if kind == "add":
            expected = to = torch.randn(rows, count, generator=generator)
            for other in all_parts:
                expected = expected + other
            found[kind].append(torch.equal(ranks.add(part, to), expected))
        elif kind == "columns":
            expected = torch.cat(list(all_parts), dim=1)
            found[kind].append(torch.equal(ranks.columns(part), expected))
        else:
            numbers = torch.arange(turn, turn + count, dtype=torch.int32)
            said = ranks._spread(numbers if ranks.leads else count)
            found[kind].append(torch.equal(said, numbers))
    assert int(ranks._exchange.counts[0]) >= TURNS
    return found
