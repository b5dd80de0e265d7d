"""How large the seats of cycles in flight must be, and what they take of the device's memory."""

from __future__ import annotations

from outrider.control.depth import DEEPEST
from outrider.drafters.base import Drafter
from outrider.kernels.warps import WarpsRows
from outrider.models.seats import Seats
from outrider.models.target import Target


def seating(
    drafter: Drafter | None, depth: int, width: int, nodes: int, max_context: int, block_size: int
) -> tuple[int, int]:
    """Most levels of a guess, and most blocks of one request's table, where trees are no larger than this."""
    levels = max(depth, DEEPEST)
    slots = max_context + levels + 1 + max(nodes, levels)
    if drafter:
        slots += drafter.needs.num_scratch(levels, max(width, drafter.needs.width))
    return levels, -(-slots // block_size) + 1


def seats_bytes(target: Target, drafter: Drafter | None, num_seats: int, levels: int, blocks: int) -> int:
    """Bytes of the device for what it keeps of each seat, and for what a drafter keeps there."""
    own = drafter.seat_bytes(levels) if drafter else 0
    vocab_size = target.vocab_size if isinstance(target.kernels, WarpsRows) else 0
    return Seats.bytes_of(num_seats, levels, blocks, vocab_size) + (num_seats + 1) * own
