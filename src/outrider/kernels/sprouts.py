"""From the ranked columns of a level to weighed children, and to the best of them: trees that grow on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.kernels.places import NOTHING


@dataclass(frozen=True, slots=True)
class Fits:
    """Logistic fits of the chance that a column is drawn under shared noise: a constant, of the gap, of log q.

    Attributes:
        leader, follower: of a row's best column, and of the others. wide: a larger gap says no more.
    """

    leader: tuple[float, float, float]
    follower: tuple[float, float, float]
    wide: float


@dataclass(frozen=True, slots=True)
class Ranked:
    """What `Kernels.rank` found in the rows of R requests with A nodes each, all (R * A, ...).

    Attributes:
        logits: (R * A, V_d) float32. scores, columns, masses: see `Kernels.rank`.
        trust: (R * A,) float32, a factor of each row's chances, or None.
    """

    logits: Tensor
    scores: Tensor
    columns: Tensor
    masses: Tensor
    trust: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Frontier:
    """A nodes a request whose children are wanted.

    Attributes:
        tokens: (R, A) int64, `NOTHING` where there is no node. weights: (R, A) float32, of the paths down to them.
        paths: (R, A, D) int64, places in the drafter's scratch of those paths. origins: (R * A,) int64, each one's
            parent as a row of the level above. chosen: (R, A) int64, which of their level's children they are.
    """

    tokens: Tensor
    weights: Tensor
    paths: Tensor
    origins: Tensor
    chosen: Tensor

    @staticmethod
    def of_roots(num_requests: int, device: torch.device) -> Frontier:
        """The requests' last known tokens, which are no guesses."""
        none = torch.zeros(num_requests, 1, dtype=torch.int64, device=device)
        weights = torch.ones(num_requests, 1, device=device)
        return Frontier(none, weights, none[:, :, None][:, :, :0], none[:, 0], none - 1)


@dataclass(frozen=True, slots=True)
class Sprouts:
    """The children of a frontier: tokens (R, A * W) int64, weights (R, A * W) float32, and each request's W best."""

    tokens: Tensor
    weights: Tensor
    best: Frontier


class PlainSproutVerbs:
    """The twin in plain PyTorch; see `Kernels`."""

    def sprout(
        self, ranked: Ranked, above: Frontier, width: int, heat: Tensor, fits: Fits, kept: Tensor | None = None
    ) -> Sprouts:
        """See `Kernels.sprout`."""
        size, num = above.tokens.shape
        missing = max(0, width + 1 - ranked.columns.shape[1])  # a vocabulary of a few words
        columns = nn.functional.pad(ranked.columns, (0, missing), value=-1)[:, : width + 1]
        scores = nn.functional.pad(ranked.scores, (0, missing), value=-torch.inf)[:, : width + 1]
        chances = _chances(ranked, columns, scores, heat.repeat_interleave(num), fits)[:, :width]
        if ranked.trust is not None:
            chances = chances * ranked.trust[:, None]
        tokens = columns[:, :width].clamp(min=0)
        tokens = tokens if kept is None else kept[tokens]
        is_none = (columns[:, :width] < 0) | (above.tokens.flatten()[:, None] < 0)
        tokens = torch.where(is_none, NOTHING, tokens).view(size, -1)
        weights = (above.weights[:, :, None] * chances.view(size, num, width)).flatten(1)
        order = weights.sort(dim=1, descending=True, stable=True).indices[:, :width]
        depth = above.paths.shape[2]
        own = torch.arange(width, device=order.device).expand(size, -1) + depth * width
        rows = order // width
        best = Frontier(
            tokens.gather(1, order),
            weights.gather(1, order),
            torch.cat([above.paths.gather(1, rows[:, :, None].expand(-1, -1, depth)), own[:, :, None]], dim=2),
            (torch.arange(size, device=order.device)[:, None] * num + rows).flatten(),
            order,
        )
        return Sprouts(tokens, weights, best)


def _chances(ranked: Ranked, columns: Tensor, scores: Tensor, heat: Tensor, fits: Fits) -> Tensor:
    """(P, K) float32: how likely each column is the target's draw."""
    logs = ranked.logits.gather(1, columns.clamp(min=0)) - ranked.masses[:, None].float()
    leader = scores[:, :1]
    gaps = torch.cat([leader - scores[:, 1:2], leader - scores[:, 1:]], dim=1).float()
    gaps = gaps.nan_to_num(fits.wide).clamp(max=fits.wide)
    lead, follow = (torch.sigmoid(c + g * gaps + q * logs) for c, g, q in (fits.leader, fits.follower))
    noisy = torch.cat([lead[:, :1], follow[:, 1:]], dim=1)
    chances = torch.where(heat[:, None] > 0, noisy, logs.clamp(max=0.0).exp()).nan_to_num(0.0)
    return torch.where(columns >= 0, chances, 0.0)
