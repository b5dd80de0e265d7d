"""The target's own replies from a folder of token shards, as batches of conversations of about one length.

One conversation is one row of a batch, padded at its right end: under causal attention no position sees another
conversation or the padding, positions begin at 0, and no mask is needed. Conversations of about one length share a
batch, so that little is padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from outrider.errors import TrainingError

LENGTH_STEP = 32
"""Rows of a batch are padded to a multiple of this: few shapes to compile, attention kernels that divide evenly."""
POOL = 64
"""Batches whose conversations are sorted by length together; larger pools pad less and mix less."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """B conversations padded to S positions, and the N positions whose next token belongs to the target's reply.

    The N positions lie one conversation after the other, in order: what precedes entry n of a conversation is entry
    n - 1.

    Attributes:
        tokens: (B, S) int64, 0 where padded. lengths, replies: (B,) int64, tokens of a conversation, and where its
            reply begins (at least 1).
        rows: (N,) int64 flat positions b * S + t. offsets: (N,) int64, number of the predicted token x_{t+1} within
            its reply, from 0.
        firsts: (B,) int64, entry of each conversation's first predicted token.
        seed: of whatever is drawn for this batch. num_tokens: tokens that are not padding.
    """

    tokens: Tensor
    lengths: Tensor
    replies: Tensor
    rows: Tensor
    offsets: Tensor
    firsts: Tensor
    seed: int
    num_tokens: int

    def to(self, device: torch.device) -> Batch:
        """On `device`, copied without waiting for it."""
        if device.type == "cpu":
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: value.pin_memory().to(device, non_blocking=True)
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        return Batch(**{**values, **moved})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Conversations laid end to end.

    Attributes:
        tokens: (N,) int32. starts: (C,) first token of each conversation. lengths: (C,). replies: (C,) offset within
            the conversation where the target's own reply begins.
    """

    tokens: NDArray[np.int32]
    starts: Ints
    lengths: Ints
    replies: Ints

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def read(cls, folders: Path | Sequence[Path], max_length: int = 2048) -> Corpus:
        """Read every `shard-*.safetensors` of one folder or several; conversations are cut after `max_length` tokens.

        Conversations without a reply, or whose reply begins beyond the cut, are left out.

        Raises:
            TrainingError: if there is no shard, a shard is damaged, or nothing is left to learn from.
        """
        paths: list[Path] = []
        for folder in [folders] if isinstance(folders, Path) else folders:
            found = sorted(folder.glob("shard-*.safetensors"))
            if not found:
                raise TrainingError(f"{folder} holds no shards of replies: generate them first, or name their folder")
            paths += found
        parts = [_read_shard(path) for path in paths]
        sizes = np.cumsum([0] + [len(tokens) for tokens, _, _ in parts[:-1]])
        starts = np.concatenate([s[:-1] + size for (_, s, _), size in zip(parts, sizes, strict=True)])
        lengths = np.minimum(np.concatenate([np.diff(s) for _, s, _ in parts]), max_length)
        replies = np.maximum(np.concatenate([r for _, _, r in parts]), 1)
        kept = replies < lengths
        if not kept.any():
            raise TrainingError(
                f"the shards hold no reply within {max_length} tokens: generate more, or raise max_length"
            )
        return cls(np.concatenate([tokens for tokens, _, _ in parts]), starts[kept], lengths[kept], replies[kept])

    def split(self, held_out: float = 0.01) -> tuple[Corpus, Corpus]:
        """(training, held out): by a hash of the prompt, so that replies to one prompt never lie on both sides.

        Raises:
            TrainingError: if either side would be empty.
        """
        limit = int(held_out * 2**32)
        hashes = [
            int.from_bytes(hashlib.blake2b(self.tokens[a : a + r].tobytes(), digest_size=4).digest(), "big")
            for a, r in zip(self.starts.tolist(), self.replies.tolist(), strict=True)
        ]
        out = np.asarray(hashes, dtype=np.int64) < limit
        if out.all() or not out.any():
            raise TrainingError(
                f"{len(self)} conversations are too few to hold {held_out:.1%} of them out: generate more replies"
            )
        return self._take(~out), self._take(out)

    def held_out_prompts(self, held_out: float, limit: int) -> list[tuple[int, ...]]:
        """Token ids of the first `limit` different prompts of the held-out part."""
        part = self.split(held_out)[1]
        prompts = (
            tuple(self.tokens[start : start + reply].tolist())
            for start, reply in zip(part.starts.tolist(), part.replies.tolist(), strict=True)
        )
        return list(dict.fromkeys(prompts))[:limit]

    def _take(self, kept: NDArray[np.bool_]) -> Corpus:
        return Corpus(self.tokens, self.starts[kept], self.lengths[kept], self.replies[kept])

    def count(self, vocab_size: int) -> Ints:
        """How often the replies hold each id: (V,) int64."""
        edges = np.zeros(len(self.tokens) + 1, dtype=np.int8)
        edges[self.starts + self.replies] += 1
        edges[self.starts + self.lengths] -= 1
        return np.bincount(self.tokens[np.cumsum(edges[:-1]) > 0], minlength=vocab_size)

    def batches(self, batch_tokens: int, seed: int, skip: int = 0, every: int = 1) -> Iterator[Batch]:
        """One pass over all conversations in an order that `seed` alone decides.

        Args:
            batch_tokens: most positions of a batch, padding included (a longer conversation is a batch by itself).
            skip, every: give batches skip, skip + every, ...: a place to go on from, and a share for each process;
                every share has the same number of batches, the first ones filling up the last round.
        """
        plan = self._plan(batch_tokens, np.random.default_rng(seed))
        for index in range(skip, len(plan) + -len(plan) % every, every):
            yield self._collate(plan[index % len(plan)], seed * 1_000_003 + index)

    def _plan(self, batch_tokens: int, rng: np.random.Generator) -> list[Ints]:
        """Conversations of each batch: shuffled, sorted by length within pools, cut, and the batches shuffled."""
        order = rng.permutation(len(self))
        padded = _round_up(self.lengths, LENGTH_STEP)
        pools = np.cumsum(padded[order]) // (batch_tokens * POOL)
        order = order[np.lexsort((self.lengths[order], pools))]
        plan: list[Ints] = []
        first = 0
        for place in range(1, len(order)):
            width = int(padded[order[place]])  # the widest so far: lengths rise within a pool
            new_pool = pools[place] != pools[place - 1]
            if new_pool or width * (place - first + 1) > batch_tokens:
                plan.append(order[first:place])
                first = place
        plan.append(order[first:])
        return [plan[index] for index in rng.permutation(len(plan))]

    def _collate(self, chosen: Ints, seed: int) -> Batch:
        lengths, replies = self.lengths[chosen], self.replies[chosen]
        width = int(_round_up(lengths.max(keepdims=True), LENGTH_STEP)[0])
        columns = np.arange(width)
        inside = columns < lengths[:, None]
        places = np.where(inside, self.starts[chosen][:, None] + columns, 0)
        tokens = np.where(inside, self.tokens[places], 0).astype(np.int64)
        predicts = (columns >= replies[:, None] - 1) & (columns < lengths[:, None] - 1)
        rows = np.flatnonzero(predicts)
        offsets = (columns - replies[:, None] + 1)[predicts]
        firsts = np.cumsum(predicts.sum(axis=1)) - predicts.sum(axis=1)
        return Batch(
            tokens=torch.from_numpy(tokens),
            lengths=torch.from_numpy(lengths),
            replies=torch.from_numpy(replies),
            rows=torch.from_numpy(rows),
            offsets=torch.from_numpy(offsets),
            firsts=torch.from_numpy(firsts),
            seed=seed,
            num_tokens=int(lengths.sum()),
        )


def _round_up(values: Ints, step: int) -> Ints:
    return (values + step - 1) // step * step


def _read_shard(path: Path) -> tuple[NDArray[np.int32], Ints, Ints]:
    """(tokens (N,), starts (C + 1,), replies (C,)) of one shard.

    Raises:
        TrainingError: if the file is damaged or is not such a shard.
    """
    try:
        held = load_file(path)
        tokens, starts, replies = held["tokens"], held["starts"], held["replies"]
    except (SafetensorError, OSError, KeyError) as error:
        raise TrainingError(f"{path} is not a whole shard of replies ({error}): delete it and go on without") from error
    if len(starts) != len(replies) + 1 or starts[0] != 0 or starts[-1] != len(tokens) or (np.diff(starts) < 0).any():
        raise TrainingError(f"{path} is not a whole shard of replies (its offsets disagree): delete it")
    return tokens, starts.astype(np.int64), replies.astype(np.int64)
