"""Passes that nobody asked for, before the first request: what they take in memory and in time, and their graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from outrider.cache.pages import Pages
from outrider.control.cost import CONTEXT, LONG, WIDTHS, PassCost
from outrider.control.prices import Prices
from outrider.engine.memory import PASS
from outrider.models.batch import BatchBuilder, FlatBatch
from outrider.models.graph import BUCKETS
from outrider.models.target import Target

WIDER = (128, 256)
"""Widths that are measured on a GPU besides: trees of several requests fill them, and cost less than in proportion."""
STREAMS, INNER = 8, 4
"""Float32 numbers of a row in a pass on a CPU, counted from above: in hidden channels, and in units of the MLP."""


def pass_bytes(
    target: Target, block_size: int, context: int, taps: tuple[int, ...] = ()
) -> Callable[[int, int], int | None]:
    """Bytes that a pass of so many rows takes, so many of them with logits: measured on a GPU, counted on a CPU.

    The function gives None where the device cannot hold such a pass.

    Args:
        context: known tokens behind which the rows stand at most.
    """
    if target.device.type == "cuda":
        return partial(_measured, target, block_size, min(context, target.max_positions) - 1, taps)
    return partial(_counted, target, len(taps))


def take_graphs(target: Target, pages: Pages, rows: int, block_size: int, taps: tuple[int, ...] = ()) -> None:
    """Run the widest pass that has a graph once, then narrower ones, so that graphs are taken the largest first; others
    follow as they are met. Where nothing runs as a graph, nothing happens."""
    if getattr(target.model, "graphs", None) is None:
        return
    widest = min(rows, target.fixed_width or BUCKETS[-1])
    widths = {widest} if target.fixed_width else {widest, *(width for width in (*WIDTHS, *WIDER) if width < widest)}
    for width in sorted(widths, reverse=True):
        target.forward(_blank(target, width, block_size), pages, taps=taps)


def prices_of(
    target: Target,
    pages: Pages,
    block_size: int,
    taps: tuple[int, ...] = (),
    kept: Prices | None = None,
    rows: int = WIDTHS[-1],
) -> Prices:
    """Seconds of passes by rows, which read and write the block that belongs to nobody.

    kept: what was measured before, taken over where a few passes confirm it. rows: of the widest pass; on a GPU, where
    trees of several requests fill wide ones, more of them are measured.
    """
    longest = min(target.max_positions - 1, pages.num_slots - block_size, LONG)
    for stack in (*pages.keys, *pages.values):
        stack[: longest + 1] = 0  # memory that nobody wrote to is read from one page of zeros, which is always at hand

    def run(rows: int, context: int) -> float:
        batch = _blank(target, rows, block_size, context, spread=context <= longest)
        return _seconds(target, pages, batch, taps)

    if kept is not None and (dearer := kept.cost.confirmed(run)) is not None:
        kept.scale(dearer)
        return kept
    wider = tuple(width for width in WIDER if width <= rows) if target.device.type == "cuda" else ()
    return Prices(PassCost.measure(run, (*WIDTHS, *wider), longest=longest))


def _seconds(target: Target, pages: Pages, batch: FlatBatch, taps: tuple[int, ...]) -> float:
    started = time.perf_counter()
    target.forward(batch, pages, taps=taps).logits[-1, -1].item()  # waits for the device
    return time.perf_counter() - started


def _measured(
    target: Target, block_size: int, context: int, taps: tuple[int, ...], rows: int, logit_rows: int
) -> int | None:
    device = target.device
    try:
        batch, pages = _blank(target, rows, block_size, context, logit_rows), target.make_pages(block_size)
        with torch.cuda.device(device), target.kernels.graph_pool.closed():
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            target.forward(batch, pages, taps=taps)
            return torch.cuda.max_memory_allocated() - before
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def _counted(target: Target, num_taps: int, rows: int, logit_rows: int) -> int:
    text = target.config.get_text_config(decoder=True)
    inner = getattr(text, "intermediate_size", None) or 4 * target.hidden_size
    return PASS * (rows * ((STREAMS + num_taps) * target.hidden_size + INNER * inner) + logit_rows * target.vocab_size)


def _blank(
    target: Target,
    rows: int,
    block_size: int,
    context: int = CONTEXT,
    logit_rows: int | None = None,
    spread: bool = False,
) -> FlatBatch:
    """Rows of one request that are written to block 0; the last so many of them with logits (None: all).

    spread: they read blocks of their own each, as a request's keys lie, and not the same one again and again.
    """
    context = min(context, target.max_positions - 1)
    builder = BatchBuilder(block_size)
    num_blocks = context // block_size + 1
    builder.request(list(range(num_blocks)) if spread else [0] * num_blocks)
    for _ in range(rows):
        builder.node(0, context, [0])
    batch = builder.build(target.device)
    if logit_rows is None or logit_rows == rows:
        return batch
    return FlatBatch(
        batch.tokens,
        batch.positions,
        batch.slots,
        batch.keys,
        torch.arange(rows - logit_rows, rows, device=target.device),
    )
