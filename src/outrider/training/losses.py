"""How far a draft law is from the target's: divergences over kept ids, and what acceptance they stand for.

The target's law p is over the whole vocabulary, the draft law q over the kept ids (zero elsewhere). Where a divergence
would be infinite for the mass of p outside (forward and reverse KL), p is renormalised over the kept ids; total
variation, the Jensen-Shannon divergence and the acceptance alpha = sum_v min(p(v), q(v)) = 1 - TV(p, q) use the true p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from outrider.errors import ConfigError
from outrider.training.settings import LOSSES

HYBRID_RATE = 3.0
"""eta of the hybrid's weight exp(-eta * alpha) (LK losses, 2602.23881)."""


@dataclass(frozen=True, slots=True)
class Law:
    """The target's law at the N positions of a batch whose next token is learnt.

    Attributes:
        logits: (N, V_d) at the kept ids, in the target's own float type. log_z: (N,) float32, log-sum-exp of the
            logits over the whole vocabulary. top: (N,) int64, kept index of the likeliest id, -1 where it is not kept.
    """

    logits: Tensor
    log_z: Tensor
    top: Tensor

    def at(self, entries: Tensor) -> Law:
        """The law of other entries, in another order or repeated."""
        return Law(self.logits[entries], self.log_z[entries], self.top[entries])


@dataclass(frozen=True, slots=True)
class Scores:
    """What came out row by row, each (N,): the divergence float32 (it alone carries a gradient), alpha float32, and
    whether the likeliest draft token is the target's likeliest, bool.
    """

    loss: Tensor
    alpha: Tensor
    hit: Tensor


def divergence(kind: str, draft: Tensor, logits: Tensor, log_z: Tensor) -> tuple[Tensor, Tensor]:
    """(divergence, alpha) of N rows, float32 (N,) each.

    Args:
        kind: "forward_kl" KL(p || q), "reverse_kl" KL(q || p), "jsd", "tv", or "hybrid": lambda KL(p || q) +
            (1 - lambda) TV, lambda = exp(-3 alpha) without a gradient (LK losses, 2602.23881): KL where the draft is
            far off and TV has hardly a gradient, TV, which is what acceptance counts, where it is near.
        draft: (N, V_d) logits of the drafter. logits, log_z: as in `Law`.
    """
    log_q = draft.float().log_softmax(dim=-1)
    log_p = logits.float() - log_z[:, None]
    q, p = log_q.exp(), log_p.exp()
    alpha = torch.minimum(p, q).sum(dim=-1)
    if kind == "tv":
        return 1 - alpha, alpha
    kept = log_p.logsumexp(dim=-1)  # log of the mass of p on the kept ids
    if kind == "reverse_kl":
        return (q * (log_q - log_p)).sum(dim=-1) + kept, alpha
    if kind == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        inside = (p * (log_p - log_m)).sum(dim=-1) + (q * (log_q - log_m)).sum(dim=-1)
        return (inside + (1 - kept.exp()) * math.log(2)) / 2, alpha
    forward = (p * (log_p - log_q)).sum(dim=-1) * (-kept).exp() - kept
    if kind == "forward_kl":
        return forward, alpha
    weight = (-HYBRID_RATE * alpha.detach()).exp()
    return weight * forward + (1 - weight) * (1 - alpha), alpha


def score_rows(kind: str, draft: Tensor, logits: Tensor, log_z: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of `Scores` for draft logits (N, V_d) under the law of the same rows."""
    loss, alpha = divergence(kind, draft, logits, log_z)
    return loss, alpha.detach(), draft.detach().argmax(dim=-1) == top


def summarise(logits: Tensor, kept_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Target logits (N, V) -> those at the kept ids (N, V_d), log-sum-exp over all (N,) float32, likeliest id (N,)."""
    wide = logits.float()
    return logits[:, kept_ids], wide.logsumexp(dim=-1), wide.argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How losses are computed: which divergence, in chunks of how many rows, by which compiled functions.

    Attributes:
        kind: one of `LOSSES`. chunk: rows whose (chunk, V_d) intermediates are alive at once; they are computed again
            in the backward pass. score_rows, summarise: the functions of this module, or compiled ones.
    """

    kind: str = "hybrid"
    chunk: int = 8192
    score_rows: Callable[..., tuple[Tensor, Tensor, Tensor]] = score_rows
    summarise: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = summarise

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise ConfigError(f"loss={self.kind!r} is unknown: choose one of {', '.join(LOSSES)}")

    def score(self, draft: Callable[..., Tensor], rows: tuple[Tensor, ...], law: Law) -> Scores:
        """Scores of N rows in chunks.

        Args:
            draft: from tensors of a chunk's rows to draft logits (n, V_d). rows: its tensors, N rows each.
        """
        parts = []
        for *inputs, logits, log_z, top in self.chunks(*rows, law.logits, law.log_z, law.top):
            parts.append(
                checkpoint(
                    self._chunk, draft, inputs, logits, log_z, top, use_reentrant=False, preserve_rng_state=False
                )
            )
        loss, alpha, hit = (torch.cat(columns)[: len(law.log_z)] for columns in zip(*parts, strict=True))
        return Scores(loss, alpha, hit)

    def chunks(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Cut tensors of N rows into chunks of one size, for compiled functions; the last is filled up with zeros."""
        for start in range(0, len(tensors[0]), self.chunk):
            parts = [tensor[start : start + self.chunk] for tensor in tensors]
            missing = self.chunk - len(parts[0])
            if missing:
                parts = [pad(part, (0, 0) * (part.dim() - 1) + (0, missing)) for part in parts]
            yield parts

    def _chunk(
        self, draft: Callable[..., Tensor], rows: Sequence[Tensor], logits: Tensor, log_z: Tensor, top: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.score_rows(self.kind, draft(*rows), logits, log_z, top)

    def fused(self) -> Arithmetic:
        """The same with its functions fused by `torch.compile`."""
        return replace(
            self,
            score_rows=torch.compile(score_rows, dynamic=False),
            summarise=torch.compile(summarise, dynamic=False),
        )
