"""How much a check of a server asks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.config import refuse_less
from outrider.errors import ConfigError

DRAWS = 240
LEAST_DRAWS = 40
"""Fewer show no law."""
MAX_TOKENS = 64
"""Of a check that is told nothing else: minutes on a CPU with a small model."""
MOST_SEED = 2**30


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

    def __post_init__(self) -> None:
        refuse_less(self, "a whole number", draws=LEAST_DRAWS, max_tokens=1, seed=0)
        if self.seed >= MOST_SEED:
            raise ConfigError(
                f"seed={self.seed} is out of range: give one below 2**30, as other seeds are counted from it"
            )
        if not 0 <= self.tie < math.inf:
            raise ConfigError(f"tie={self.tie} is out of range: give a margin in nats, such as 0.02")
