"""Medusa's heads: residual blocks over the target's last state and the last known token, one head for each position.

Sources: Medusa (Cai et al., 2401.10774); that the heads know the last token is the first step of Hydra (2402.05109),
and that they see lower layers besides the last is EAGLE-3's (2503.01840).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu
from torch.nn.functional import linear as project

from outrider.training.base import Counts, DraftModule, before, combine
from outrider.training.corpus import Batch
from outrider.training.harvest import Features
from outrider.training.layers import Shape, final_norm, norm, normed_taps

DECAY = 0.8
"""Weight of each head against the one before (2401.10774)."""
NUM_RANKS = 8
"""Ranks of a head's guesses whose hit rates the artefact states."""


class _Residual(nn.Module):
    """z + down(silu(up(z))), which begins as the identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, hidden, bias=False)
        self.down = nn.Linear(hidden, hidden, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, states: Tensor) -> Tensor:
        moved: Tensor = states + self.down(silu(self.up(states)))
        return moved


class _Plain(nn.Module):
    """z + silu(up(z)), the paper's own block, which begins as the identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, hidden, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Tensor) -> Tensor:
        moved: Tensor = states + silu(self.up(states))
        return moved


class Medusa(DraftModule):
    """Stands at x_j with the target's taps of position j - 1; head k = 1 .. K predicts x_{j+k}.

    Args:
        num_heads: K. num_blocks: residual blocks of a head.
        plain: not 0 for heads of the paper's own form, from the last state alone: weaker, but other engines read them.
    """

    rates: Tensor
    tap_norms: Tensor

    def __init__(self, shape: Shape, kept_ids: Tensor, num_heads: int = 5, num_blocks: int = 2, plain: int = 0) -> None:
        super().__init__(shape, kept_ids)
        hidden = shape.hidden
        self.num_levels = num_heads
        self.num_blocks = num_blocks
        self.plain = bool(plain)
        last = shape.num_layers - 1
        self.taps = (last,) if plain else tuple(sorted({shape.num_layers // 3, 2 * shape.num_layers // 3, last}))
        norms = torch.ones(len(self.taps), hidden)
        if plain:
            self.register_buffer("tap_norms", norms)  # the target's last one, as others have it
        else:
            self.tap_norms = nn.Parameter(norms)
            self.embed_norm = nn.RMSNorm(hidden, shape.eps)
            self.in_proj = nn.Linear((len(self.taps) + 1) * hidden, hidden, bias=False)
            nn.init.zeros_(self.in_proj.weight)
        block = _Plain if plain else _Residual
        self.heads = nn.ModuleList(nn.Sequential(*(block(hidden) for _ in range(num_blocks))) for _ in range(num_heads))
        self.register_buffer("rates", torch.zeros(num_heads, NUM_RANKS))

    @classmethod
    def initialise(cls, module: Any, kept_ids: Tensor, **settings: Any) -> Self:
        """Every head begins as the target's own norm and head: the state's next token."""
        made = cls(Shape.of(module), kept_ids, **settings).to(module.device)
        with torch.no_grad():
            made.tap_norms[-1].copy_(final_norm(module))
        return made

    def settings(self) -> dict[str, Any]:
        return {
            "taps": list(self.taps),
            "vocabulary": len(self.kept_ids),
            "num_heads": self.num_levels,
            "num_blocks": self.num_blocks,
            **({"plain": 1} if self.plain else {}),
        }

    def loss(self, batch: Batch, features: Features) -> tuple[Tensor, Counts]:
        states = self._states(batch, features)
        scores = []
        for level, head in enumerate(self.heads):
            rows = head(before(states, batch.rows, level))
            scores.append(
                features.arithmetic.score(
                    lambda state: project(state, features.head, features.bias), (rows,), features.law
                )
            )
        return combine(scores, batch.offsets, [DECAY**level for level in range(self.num_levels)])

    def _states(self, batch: Batch, features: Features) -> Tensor:
        """z, (B, S, H): the last layer's state, moved by all taps and the token."""
        eps = self.shape.eps
        states = normed_taps(features.taps, self.taps, self.tap_norms, eps)
        if self.plain:
            return states[-1]
        token = norm(embedding(batch.tokens, features.embedding), self.embed_norm.weight, eps)
        moved: Tensor = states[-1] + self.in_proj(torch.cat([*states, token], dim=-1))
        return moved

    @torch.no_grad()
    def settle(self, held_out: Iterable[tuple[Batch, Features]]) -> None:
        """Fill `rates`: how often rank r of head k hits the target's likeliest token where all before did."""
        hits, starts = torch.zeros_like(self.rates), torch.zeros_like(self.rates[:, :1])
        ranks = min(NUM_RANKS, len(self.kept_ids))
        for batch, features in held_out:
            states = self._states(batch, features)
            right = torch.ones_like(batch.offsets, dtype=torch.bool)
            for level, head in enumerate(self.heads):
                rows = head(before(states, batch.rows, level))
                ranked = torch.cat(
                    [
                        project(part.to(features.head.dtype), features.head, features.bias).topk(ranks).indices
                        for (part,) in features.arithmetic.chunks(rows)
                    ]
                )[: len(rows)]
                found = ranked == features.law.top[:, None]
                right = (right if level == 0 else right.roll(1)) & (batch.offsets >= level)
                hits[level, :ranks] += (found & right[:, None]).sum(dim=0)
                starts[level] += right.sum()
                right = right & found[:, 0]
        self.rates.copy_(hits / starts.clamp_min(1))
