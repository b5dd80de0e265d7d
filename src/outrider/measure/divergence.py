"""How far one target's law lies from another's: Kullback-Leibler divergence and perplexity over given texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.batch import BatchBuilder
from outrider.models.target import Target

BLOCK_SIZE = 16
ROWS = 64
"""Rows whose laws are compared at once, in float64: 64 rows of 50,000 tokens are 26 MB a law."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A target against a reference, over all positions of all texts.

    Attributes:
        positions: number of laws compared. mean_kl, max_kl: KL(reference || target) in nats.
        perplexity, reference_perplexity: of the texts' own tokens, the first of each text left out.
    """

    positions: int
    mean_kl: float
    max_kl: float
    perplexity: float
    reference_perplexity: float

    @property
    def perplexity_change(self) -> float:
        """Relative change of perplexity; 0.005 is half a per cent worse."""
        return self.perplexity / self.reference_perplexity - 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity_change": self.perplexity_change}


def divergence(target: Target, reference: Target, texts: Sequence[Sequence[int]]) -> Divergence:
    """Compare the two laws after every prefix of every text; of a widened twin's, the part over its original's words.

    Args:
        texts: token ids, each of at least two tokens and within both contexts.

    Raises:
        ConfigError: for targets of different vocabularies, or without a text of two tokens.
    """
    words = reference.vocab_size
    if (target.original or target).vocab_size != words:
        raise ConfigError(
            f"{target.name} has {target.vocab_size} tokens and {reference.name} has {reference.vocab_size}: "
            "compare targets of one vocabulary"
        )
    kl_sum, kl_max, positions, surprise, reference_surprise, predicted = 0.0, 0.0, 0, 0.0, 0.0, 0
    for ids in texts:
        following = torch.tensor(list(ids[1:]))
        logits, reference_logits = score(target, ids)[:, :words], score(reference, ids)
        for start in range(0, len(ids), ROWS):
            p, q = (part[start : start + ROWS].double().log_softmax(-1) for part in (reference_logits, logits))
            # 0 * (-inf - -inf) is NaN where both forbid a token; such a token adds nothing.
            kl = torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum(-1)
            kl_sum, kl_max, positions = kl_sum + float(kl.sum()), max(kl_max, float(kl.max())), positions + len(kl)
            said = following[start : start + ROWS, None]
            surprise -= float(q[: len(said)].gather(1, said).sum())
            reference_surprise -= float(p[: len(said)].gather(1, said).sum())
            predicted += len(said)
    if not predicted:
        raise ConfigError("nothing to compare: give at least one text of two tokens")
    perplexities = (math.exp(surprise / predicted), math.exp(reference_surprise / predicted))
    return Divergence(positions, kl_sum / positions, kl_max, *perplexities)


@torch.inference_mode()
def score(target: Target, ids: Sequence[int]) -> Tensor:
    """Logits after every prefix of one sequence, in one pass over fresh pages: (T, V) float32 on the CPU.

    Raises:
        ConfigError: for a sequence longer than the target's context.
    """
    if not 0 < len(ids) <= target.max_positions:
        raise ConfigError(f"a text has {len(ids)} tokens and the context holds {target.max_positions}: shorten it")
    num_blocks = math.ceil(len(ids) / BLOCK_SIZE)
    builder = BatchBuilder(BLOCK_SIZE)
    builder.request(range(1, num_blocks + 1))
    builder.line(0, list(ids), len(ids))
    pages = target.make_pages((num_blocks + 1) * BLOCK_SIZE)
    return target.forward(builder.build(target.device), pages).logits.cpu()
