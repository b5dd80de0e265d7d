"""How much a check of a server asks."""

from __future__ import annotations

from dataclasses import dataclass

DRAWS = 240
MAX_TOKENS = 64
"""Of a check that is told nothing else: minutes on a CPU with a small model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is asked.

    Attributes:
        draws: texts drawn for each law. draw_tokens: tokens of each. max_tokens: of greedy texts.
        tie: greedy texts may part where the two likeliest tokens are this near (in nats). seed: of the first draw.
    """

    draws: int = DRAWS
    draw_tokens: int = 12
    max_tokens: int = MAX_TOKENS
    tie: float = 0.0
    seed: int = 0
