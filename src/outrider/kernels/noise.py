"""Keyed noise: Philox4x32-10 in integer tensor operations, so that a draw is a function of its key alone.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The key is the request's seed; the
counter is (v >> 2, position, sample, stream), and word `v & 3` of the block belongs to token `v`. Each set of kernels
has its own form of the draw; this one defines them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Word = TypeVar("Word", int, Tensor, NDArray[np.int64])
Key = tuple[int, int, int]
"""Seed (0 <= seed < 2**64), sample, position."""

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


class Purpose(enum.IntEnum):
    """What a stream of noise is for; streams of two purposes never share a counter."""

    MATCH = 0
    """The target's own draws, which a drafter under the match rule shares."""
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def stream(purpose: Purpose, node: int = -1) -> int:
    """The last counter word, one for each (purpose, node); `MATCH` at the root is 0.

    With the position of the cycle's root as the position word, it makes the keys of the rejection rule disjoint: a
    cycle has its own root, a node its own index, and a sibling is a node. DRAFT is keyed by the node whose children are
    drawn, ACCEPT by the node that is tried, RESIDUAL by the node at which the walk stops.
    """
    assert -1 <= node < (1 << 24) - 1
    return (node + 1) << 8 | purpose


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 of counter and key words in [0, 2**32): integers, or int64 that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2**64, which leaves both halves of the 64-bit word right.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 32) & _MASK ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) & _MASK ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def words(seeds: Tensor, samples: Tensor, positions: Tensor, streams: int | Tensor, num: int) -> Tensor:
    """The first `num` words of each row's stream.

    seeds: (R,) int64, the bits of a uint64; samples, positions: (R,) integers in [0, 2**32); streams: one `stream`
    for all rows or (R,) of them -> (R, num) int64 in [0, 2**32).
    """
    seed = seeds.to(torch.int64).unsqueeze(1)
    if not isinstance(streams, Tensor):
        streams = torch.full_like(seeds, int(streams), dtype=torch.int64)
    blocks = torch.arange(-(-num // 4), device=seeds.device).unsqueeze(0)
    counter = (
        blocks,
        positions.to(torch.int64).unsqueeze(1) & _MASK,
        samples.to(torch.int64).unsqueeze(1) & _MASK,
        streams.to(torch.int64).unsqueeze(1) & _MASK,
    )
    key = (seed & _MASK, (seed >> 32) & _MASK)
    if seeds.device.type == "cpu":  # the same integers: some 150 operations, which cost less to call in NumPy
        numbers = [part.numpy() for part in (*counter, *key)]
        c0, c1, c2, c3, k0, k1 = numbers
        return torch.from_numpy(np.stack(philox4x32((c0, c1, c2, c3), (k0, k1)), axis=-1)).flatten(1)[:, :num]
    return torch.stack(philox4x32(counter, key), dim=-1).flatten(1)[:, :num]


def uniform(seeds: Tensor, samples: Tensor, positions: Tensor, streams: int | Tensor, num: int = 1) -> Tensor:
    """Uniform noise in the open interval (0, 1), `(word + 1/2) / 2**32`: (R, num) float64; arguments as `words`."""
    return (words(seeds, samples, positions, streams, num).to(torch.float64) + 0.5) * 2.0**-32


def coins(keys: Sequence[Key], streams: Sequence[int] | Sequence[Sequence[int]], num: int = 1) -> NDArray[np.float64]:
    """The first `num` uniforms in (0, 1) of each key's streams, of 52 bits: two words each -> (R, S, num) float64.

    For the few coins of the rejection rule: made on the host, and finer than the rarest token of a large vocabulary.
    streams: S of them for every key, or (R, S).
    """
    seeds, samples, positions = np.array(keys, dtype=np.uint64).reshape(-1, 3).T.astype(np.int64)[:, :, None, None]
    blocks = np.arange(-(-num // 2), dtype=np.int64)
    counter = (blocks, positions, samples, np.array(streams, dtype=np.int64)[..., None])
    w0, w1, w2, w3 = philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))
    whole = np.stack((w0 << 20 | w1 >> 12, w2 << 20 | w3 >> 12), axis=-1)
    uniforms: NDArray[np.float64] = (whole.reshape(*whole.shape[:2], 2 * len(blocks))[:, :, :num] + 0.5) * 2.0**-52
    return uniforms


def gumbel(
    seeds: Tensor, samples: Tensor, positions: Tensor, vocab_size: int, streams: int | Tensor = Purpose.MATCH
) -> Tensor:
    """Standard Gumbel noise `-log(-log(u))` by token id: (R, V) float64; arguments as `words`."""
    return uniform(seeds, samples, positions, streams, vocab_size).log_().neg_().log_().neg_()
