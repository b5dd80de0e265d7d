"""The memory plan: weights, key-value slots, workspace; made before anything is allocated, and printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from outrider.cache.pages import PageSpec
from outrider.errors import CapacityError

SHARE = 0.25
"""Share of the memory that is free at start which key-value slots may take on a CPU (a laptop has other work to do)."""
GPU_SHARE = 0.85
FULL_CONTEXTS = 16
"""More slots than so many full contexts are not planned unless asked for."""


def slot_bytes(specs: Sequence[PageSpec], dtype: torch.dtype) -> int:
    """Bytes of one slot over all layers of a stack."""
    return sum(spec.num_kv_heads * (spec.key_dim + spec.value_dim) for spec in specs) * dtype.itemsize


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # no Linux: what is not in use is not known, half of all is a fair guess
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose; an upper bound of what the engine holds.

    Attributes:
        weights: target (and drafter) weights, already loaded. slots: number of key-value slots, of `slot` bytes each.
        pages: all slots. workspace: logits and laws of one pass. free: free memory when the plan was made.
    """

    weights: int
    slots: int
    slot: int
    pages: int
    workspace: int
    free: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_memory(
    *,
    weights: int,
    slot: int,
    num_slots: int | None,
    block_size: int,
    max_context: int,
    logit_rows: int,
    vocab_size: int,
    device: torch.device,
) -> MemoryPlan:
    """Decide how many slots there are; whole blocks, the first of which belongs to nobody.

    Args:
        weights: bytes. slot: bytes a slot, over all stacks. num_slots: the user's wish, or None.
        max_context: positions that one request may use. logit_rows: most rows whose logits one pass asks for.

    Raises:
        CapacityError: where not even one request of `max_context` fits, or `num_slots` exceed the memory.
    """
    free = free_memory(device)
    workspace = logit_rows * vocab_size * 4 * 3  # logits, the warped copy, noise or laws
    room = int((free - workspace) * (SHARE if device.type == "cpu" else GPU_SHARE))
    one = -(-max_context // block_size) + 2  # its own, the trash block, and one for guesses
    blocks = min(room // (slot * block_size), one * FULL_CONTEXTS) if num_slots is None else num_slots // block_size
    if blocks < one:
        raise CapacityError(
            f"{max_context} positions need {one * block_size * slot / 2**20:.0f} MiB of key-value slots but "
            f"{blocks * block_size * slot / 2**20:.0f} MiB are planned: lower max_context or raise num_slots"
        )
    slots = blocks * block_size
    if num_slots is not None and slots * slot > free:
        raise CapacityError(
            f"num_slots={num_slots} needs {slots * slot / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free: lower it"
        )
    return MemoryPlan(weights, slots, slot, slots * slot, workspace, free)
