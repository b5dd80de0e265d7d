"""What ranks of a job of the tests exchange through memory of each other's: files, and Triton's interpreter on each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.models.ranks.group import Ranks

BLOCK, ROOM, TURNS = 32, 96, 24


def send(exchange: Any, run: Callable[[], object]) -> None:
    """The first half of an exchange of one launch: its words are sent, and nothing is read yet."""
    counts, tries = exchange.counts.clone(), exchange.tries
    exchange.tries = 0
    run()
    exchange.counts.copy_(counts)
    exchange.tries = tries


def exchanges(folder: Path, ranks: Ranks) -> dict[str, list[bool]]:
    """By kind, whether exchanges of many sizes, one after the other, gave what they should on this rank, which is late
    to read half of them: the others may be ahead by then.
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
        kind, rows, count = order.choice(list(found)), order.randint(1, 5), order.randint(1, 50)
        generator = torch.Generator().manual_seed(turn)
        all_parts = torch.randn(ranks.size, rows, count, generator=generator)
        part = all_parts[ranks.rank].contiguous()
        if kind == "add":
            expected = to = torch.randn(rows, count, generator=generator)
            for other in all_parts:
                expected = expected + other
            run = partial(ranks.add, part, to)
        elif kind == "columns":
            expected, run = torch.cat(list(all_parts), dim=1), partial(ranks.columns, part)
        else:
            expected = torch.arange(turn, turn + rows * count, dtype=torch.int32)
            run = partial(ranks._spread, expected if ranks.leads else rows * count)
        if rows * count <= ROOM and own.random() < 0.5:
            send(ranks._exchange, run)
            time.sleep(0.1)
        found[kind].append(torch.equal(run(), expected))
    assert int(ranks._exchange.counts[0]) >= TURNS
    return found
