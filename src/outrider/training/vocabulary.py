"""Which ids of the target's vocabulary a drafter should know: those that the target says most.

Source: frequency-ranked trimming of the draft head, FR-Spec (2502.14856); lossless at any size, since the target
verifies over its own vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import TrainingError
from outrider.training.corpus import Corpus


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Kept ids (V_d,) int64 ascending, and the share of the counted tokens that they cover."""

    kept_ids: Tensor
    coverage: float


def choose(corpus: Corpus, size: int, vocab_size: int, eos_ids: Iterable[int] = ()) -> Vocabulary:
    """The `size` most frequent ids of the corpus' replies, ties to the lowest id; ids that end a text always.

    Raises:
        TrainingError: if the corpus holds ids beyond the vocabulary, which is another model's.
    """
    counts = _count(corpus, vocab_size)
    ends = sorted(set(eos_ids))
    order = np.lexsort((np.arange(vocab_size), -counts))
    order = np.concatenate([ends, order[~np.isin(order, ends)]]).astype(np.int64)
    return _covering(np.sort(order[: max(size, len(ends))]), counts)


def kept(corpus: Corpus, ids: Tensor, vocab_size: int) -> Vocabulary:
    """Given ids (V_d,), with what they cover of this corpus.

    Raises:
        TrainingError: if the corpus is another model's.
    """
    return _covering(ids.numpy().astype(np.int64), _count(corpus, vocab_size))


def whole(vocab_size: int) -> Vocabulary:
    """All ids."""
    return Vocabulary(torch.arange(vocab_size), 1.0)


def _count(corpus: Corpus, vocab_size: int) -> NDArray[np.int64]:
    counts = corpus.count(vocab_size)
    if len(counts) > vocab_size:
        raise TrainingError(
            f"the replies hold id {len(counts) - 1}, but the target has {vocab_size} ids: name the model that made them"
        )
    return counts


def _covering(ids: NDArray[np.int64], counts: NDArray[np.int64]) -> Vocabulary:
    return Vocabulary(torch.from_numpy(ids), float(counts[ids].sum() / max(counts.sum(), 1)))
