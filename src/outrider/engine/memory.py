"""The memory plan: every byte the engine may come to hold, settled before the first slot is taken, and told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from outrider.cache.pages import PageSpec
from outrider.engine.scheduler import PROMPT_LOGPROB_ROWS
from outrider.errors import CapacityError
from outrider.models.device_memory import free_memory

SHARE = 0.25
"""Share of the memory that is free at start which the engine may take on a CPU (a laptop has other work to do)."""
GPU_SHARE = 0.9
"""Share of a GPU's memory that may be in use, by whomever, once the engine is full."""
MARGIN = 512 << 20
"""Bytes of a GPU that no plan sees: workspaces of libraries, compiled kernels, gaps between tensors."""
GRAPHS = 768 << 20
"""Bytes of a GPU for graphs beside the largest one's pass: some hundred of them, of a few MiB each."""
FULL_CONTEXTS = 16
"""More slots than so many full contexts are not planned unless asked for."""
LEAST_ROWS = 16
"""Passes are not planned narrower than this."""
PASS, SAMPLER, DRAFT, COUNTS = 4, 8, 12, 5
"""Bytes for a token of the vocabulary: of a row's logits; of their warped copy and its law; of a guess's logits with
its scores; of a request's penalties."""


def slot_bytes(specs: Sequence[PageSpec], dtype: torch.dtype) -> int:
    """Bytes of one slot over all layers of a stack."""
    return sum(spec.num_kv_heads * (spec.key_dim + spec.value_dim) for spec in specs) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Room:
    """What a device has left beside the weights, in bytes.

    Attributes:
        free: now. usable: what the engine may take of it. margin: what stays out of the plan.
        graphs: whether passes run as CUDA graphs there.
    """

    free: int
    usable: int
    margin: int = 0
    graphs: bool = False

    @staticmethod
    def of(device: torch.device, share: float | None, asked: bool = False) -> Room:
        """As it is now.

        Args:
            share: of a GPU's memory, what others hold of it included; of a CPU's, as far as it is free. None: `SHARE`,
                `GPU_SHARE`; or all of it where the number of slots was `asked` for.
        """
        if share is None:
            share = 1.0 if asked else (GPU_SHARE if device.type == "cuda" else SHARE)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what loading held, and PyTorch keeps for later
            free, total = torch.cuda.mem_get_info(device)
            return Room(free, int(free - (1 - share) * total), MARGIN, graphs=True)
        free = free_memory(device)
        return Room(free, int(free * share))

    def least(self, free: int) -> Room:
        """Where another rank that must hold as much has no more than this."""
        less = max(0, self.free - free)
        return replace(self, free=self.free - less, usable=max(0, self.usable - less))


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the settings ask of memory.

    Attributes:
        target, drafter: bytes of weights, loaded already. target_slot, drafter_slot: bytes of a slot of their stacks.
        num_slots: what the user asked for, or None. max_context: positions that one request may use.
        seats: bytes of what the device keeps of each request whose cycles are in flight.
        nodes: most guesses and probes of one request's pass. ranks: whether they come from laws of the drafter's own.
    """

    target: int
    drafter: int
    target_slot: int
    drafter_slot: int
    num_slots: int | None
    block_size: int
    max_context: int
    max_requests: int
    max_rows: int
    nodes: int
    ranks: bool
    vocab_size: int
    seats: int = 0

    def logit_rows(self, rows: int) -> int:
        """Most rows with logits in a pass of so many rows: trees, or prompts whose log-probabilities are told."""
        return min(rows, self.max_requests * max(1 + self.nodes, PROMPT_LOGPROB_ROWS))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose; an upper bound of what the engine holds.

    Attributes:
        target, drafter: weights, loaded already. slots: number of key-value slots. target_stack, drafter_stack: their
            pages. graphs: budget of all CUDA graphs. passes: buffers and logits of the widest pass.
        sampler: laws of (nodes x vocabulary), penalties, and the drafter's own. seats: what the device keeps of each
            request whose cycles are in flight. margin: left out of the plan.
        free: free memory when the plan was made, weights being loaded.
        max_rows, nodes: as they fit. note: what was lowered, and why; None where nothing was.
    """

    target: int
    drafter: int
    slots: int
    target_stack: int
    drafter_stack: int
    graphs: int
    passes: int
    sampler: int
    margin: int
    free: int
    max_rows: int
    nodes: int
    seats: int = 0
    note: str | None = None

    @property
    def taken(self) -> int:
        """Bytes that the engine takes of `free`, at most; the margin is not among them."""
        return self.target_stack + self.drafter_stack + self.graphs + self.passes + self.sampler + self.seats

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "taken": self.taken}

    def table(self) -> dict[str, str]:
        """One entry a purpose, for people."""
        return {
            "target's weights": _mib(self.target),
            "drafter's weights": _mib(self.drafter),
            f"target's stack of {self.slots:,} slots": _mib(self.target_stack),
            "drafter's stack": _mib(self.drafter_stack),
            "graphs, at most": _mib(self.graphs),
            f"a pass of {self.max_rows:,} rows": _mib(self.passes),
            "sampler": _mib(self.sampler),
            "cycles in flight": _mib(self.seats),
            "left out of the plan": _mib(self.margin),
            "free beside the weights": _mib(self.free),
        }

    def sentence(self) -> str:
        return (
            f"weights {_mib(self.target + self.drafter)}, {self.slots:,} slots "
            f"{_mib(self.target_stack + self.drafter_stack)}, graphs {_mib(self.graphs)}, workspace "
            f"{_mib(self.passes + self.sampler + self.seats)}, of {_mib(self.free)} free beside the weights"
        )


def plan_memory(wishes: Wishes, room: Room, pass_bytes: Callable[[int, int], int | None]) -> MemoryPlan:
    """Decide how many slots there are; whole blocks, the first of which belongs to nobody.

    Where not even one request of `max_context` fits beside the workspace, passes are narrowed, and trees with them, to
    `LEAST_ROWS`; then graphs are given up.

    Args:
        pass_bytes: of a pass of so many rows, so many of them with logits; None where the device cannot hold it.

    Raises:
        CapacityError: where even that does not fit, or `num_slots` exceed the memory.
    """
    size, slot = wishes.block_size, wishes.target_slot + wishes.drafter_slot
    one = -(-wishes.max_context // size) + 2  # its own, the trash block, and one for guesses
    asked = None if wishes.num_slots is None else wishes.num_slots // size
    if asked is not None and asked < one:
        raise CapacityError(
            f"{wishes.max_context} positions need {one * size} slots and num_slots={wishes.num_slots} holds "
            f"{asked * size}: lower max_context or raise num_slots"
        )
    least, left = one if asked is None else asked, 0
    for rows, graphs, passes, sampler in _workspaces(wishes, room, pass_bytes):
        left = room.usable - room.margin - graphs - passes - sampler - wishes.seats
        if left >= least * size * slot:
            blocks = min(left // (size * slot), one * FULL_CONTEXTS) if asked is None else asked
            slots, nodes = blocks * size, min(wishes.nodes, rows - 1)
            return MemoryPlan(
                target=wishes.target,
                drafter=wishes.drafter,
                slots=slots,
                target_stack=slots * wishes.target_slot,
                drafter_stack=slots * wishes.drafter_slot,
                graphs=graphs,
                passes=passes,
                sampler=sampler,
                margin=room.margin,
                free=room.free,
                max_rows=rows,
                nodes=nodes,
                seats=wishes.seats,
                note=_lowered(wishes, rows, nodes, room.graphs and not graphs),
            )
    raise CapacityError(_refusal(wishes, least * size * slot, left, room))


def _workspaces(
    wishes: Wishes, room: Room, pass_bytes: Callable[[int, int], int | None]
) -> Iterator[tuple[int, int, int, int]]:
    """Rows of a pass, and bytes of graphs, pass and sampler: as wished, then less and less."""
    rows = wishes.max_rows
    while True:
        told = wishes.logit_rows(rows)
        passes = pass_bytes(rows, told)
        if passes is not None:
            copies = SAMPLER + DRAFT if wishes.ranks else SAMPLER
            sampler = wishes.vocab_size * (copies * told + COUNTS * wishes.max_requests)
            yield rows, passes + GRAPHS if room.graphs else 0, passes, sampler
            if room.graphs and rows <= LEAST_ROWS:
                yield rows, 0, passes, sampler
        if rows <= LEAST_ROWS:
            return
        rows = max(LEAST_ROWS, rows // 2)


def _lowered(wishes: Wishes, rows: int, nodes: int, no_graphs: bool) -> str | None:
    parts = []
    if rows < wishes.max_rows:
        parts.append(f"passes are narrowed from {wishes.max_rows} to {rows} rows")
    if nodes < wishes.nodes:
        parts.append(f"trees are cut from {wishes.nodes} to {nodes} nodes")
    if no_graphs:
        parts.append("passes run without a CUDA graph, slower")
    return f"{', '.join(parts)}: memory holds no more beside {wishes.max_context} positions" if parts else None


def _refusal(wishes: Wishes, needed: int, left: int, room: Room) -> str:
    drafter = f", choose drafter='none' ({_mib(wishes.drafter)} of weights)" if wishes.drafter else ""
    what = f"{wishes.max_context} positions need" if wishes.num_slots is None else f"num_slots={wishes.num_slots} needs"
    lower = "max_context" if wishes.num_slots is None else "num_slots"
    return (
        f"{what} {_mib(needed)} of key-value slots and {_mib(max(0, left))} are left for them of {_mib(room.free)} "
        f"free beside the weights: lower {lower}, raise memory_share{drafter}"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
