"""What a pass of a target takes, by its rows and by its requests, beside the least that reading its bytes takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.cache.pages import Pages
from outrider.engine.memory import slot_bytes
from outrider.errors import CapacityError
from outrider.measure.cycle import LEAST, seconds_of
from outrider.models.batch import BatchBuilder, FlatBatch
from outrider.models.device_memory import free_memory
from outrider.models.target import Target
from outrider.tree import ROOT

BLOCK = 16
DEEPEST = 16
"""Levels of the trees that wide passes hold."""
QUEUE = 8
"""Passes in a row."""
SHARE = 0.8
"""Of the free memory that keys may take while passes are measured."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One shape of pass: requests, and rows of each (a tree, every row with logits).

    Attributes:
        seconds: median, alone, from the call until the device is done. queued: mean of `QUEUE` passes that wait for one
            another on the device, so that what the host does for each is hidden; on a CPU there is no queue.
        nbytes: of the weights that a pass streams, and of the keys and values that a request's last token sees, once.
    """

    requests: int
    rows: int
    seconds: float
    queued: float | None
    nbytes: int

    def share(self, bytes_per_second: float) -> float:
        """Of the read limit: 1 is a pass that takes no longer than reading its bytes."""
        return self.nbytes / bytes_per_second / self.seconds


def streamed_bytes(target: Target, rows: int | None = None) -> int:
    """Bytes of weights that a pass of so many rows reads: all but tables, an embedding that is only looked up, and the
    experts that no row is expected to choose, if rows choose alike (None: all experts are chosen)."""
    return _streamed(target) - (0 if rows is None else _idle_bytes(target, rows))


def _streamed(target: Target) -> int:
    model: Any = target.model
    head = model.head_rows(None)
    spec = getattr(model, "spec", None)
    if spec is None:  # a module of Transformers
        embedding = model.module.get_input_embeddings().weight
        is_tied = model.module.get_output_embeddings().weight is embedding
        return int(target.nbytes - (0 if is_tied else embedding.nbytes))
    tables = sum(table.nbytes for table in model.rotary())
    return int(target.nbytes - tables - (0 if spec.tied else head.nbytes))


def _idle_bytes(target: Target, rows: int) -> int:
    """Expected bytes of experts that none of so many rows chooses."""
    config = target.config.get_text_config(decoder=True)
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    module = getattr(target.model, "module", None)
    if not count or module is None:
        return 0
    experts = sum(p.nbytes for p in module.parameters() if p.dim() == 3 and p.shape[0] == count)
    return int(experts * (1 - config.num_experts_per_tok / count) ** rows)


def key_bytes(target: Target, context: int) -> int:
    """Bytes of the keys and values that one request's next token sees: in some layers, no more than a window."""
    seen = (context if window is None else min(window, context) for window in _windows(target))
    return sum(
        count * slot_bytes([page], target.page_dtype) for count, page in zip(seen, target.page_specs, strict=True)
    )


def _windows(target: Target) -> Sequence[int | None]:
    """Positions that each layer sees, None for all."""
    model: Any = target.model
    spec = getattr(model, "spec", None)
    return [call.window for call in model.calls] if spec is None else spec.windows


def measure_passes(
    target: Target,
    shapes: Sequence[tuple[int, int]],
    context: int,
    repeats: int = 10,
    idle: Pages | None = None,
) -> tuple[list[Pass], list[str]]:
    """Time passes of (requests, rows of each) behind `context` known tokens, each request with keys of its own.

    Args:
        idle: pages of an engine in which nothing is kept, which may have taken most of the memory.

    Returns:
        Passes in the order of the shapes, and notes on those that memory does not hold.

    Raises:
        CapacityError: if it holds none.
    """
    context = min(context, target.max_positions - DEEPEST - 1)
    keys = key_bytes(target, context)
    slot = slot_bytes(target.page_specs, target.page_dtype)
    held = 0 if idle is None else idle.num_slots
    room = max(held, int(free_memory(target.device) * SHARE) // slot)
    fitting = [shape for shape in shapes if _slots(*shape, context) <= room]
    if not fitting:
        raise CapacityError(f"no pass fits into memory at a context of {context}: lower it")
    needed = max(_slots(*shape, context) for shape in fitting)
    pages = target.make_pages(needed) if idle is None or needed > held else idle
    passes = []
    for requests, rows in fitting:
        batch = _batch(target, requests, rows, context)
        run = partial(target.forward, batch, pages)
        seconds, queued = seconds_of(target.device, run, repeats), None
        if target.device.type == "cuda":
            queued = seconds_of(target.device, partial(_repeat, run, QUEUE), LEAST, 1) / QUEUE
        nbytes = streamed_bytes(target, requests * rows) + requests * keys
        passes.append(Pass(requests, rows, seconds, queued, nbytes))
    notes = [f"{r} requests of {n} rows: more keys than memory holds" for r, n in shapes if (r, n) not in fitting]
    return passes, notes


def _blocks(rows: int, context: int) -> int:
    """Of one request: its known tokens, then a slot for every row."""
    return -(-(context + rows) // BLOCK)


def _slots(requests: int, rows: int, context: int) -> int:
    return (1 + requests * _blocks(rows, context)) * BLOCK  # the first block belongs to nobody


def _batch(target: Target, requests: int, rows: int, context: int) -> FlatBatch:
    """Requests that each verify a last token and a tree of `rows - 1` nodes below it."""
    builder, size = BatchBuilder(BLOCK), _blocks(rows, context)
    for number in range(requests):
        first = 1 + number * size
        builder.request(range(first, first + size))
        builder.line(context - 1, [number % target.vocab_size], 1)
        if rows > 1:
            width = -(-(rows - 1) // DEEPEST)
            parents = [node - width if node >= width else ROOT for node in range(rows - 1)]
            tokens = [node % target.vocab_size for node in range(rows - 1)]
            start = first * BLOCK + context
            builder.tree(context, tokens, parents, range(start, start + rows - 1))
    return builder.build(target.device)


def _repeat(run: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        run()
