"""Keyed noise: Philox4x32-10 in integer tensor operations, so that a draw is a function of its key alone.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The key is the request's seed; the
counter is (v >> 2, position, sample, stream), and word `v & 3` of the block belongs to token `v`. Each set of kernels
has its own form of the draw; this one defines them.
"""

from __future__ import annotations

import enum
from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

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
    """Philox4x32-10 of counter and key words in [0, 2**32): Python integers, or int64 tensors that broadcast."""
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
    block = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return torch.stack(block, dim=-1).flatten(1)[:, :num]


def uniform(seeds: Tensor, samples: Tensor, positions: Tensor, streams: int | Tensor, num: int = 1) -> Tensor:
    """Uniform noise in the open interval (0, 1), `(word + 1/2) / 2**32`: (R, num) float64; arguments as `words`."""
    return (words(seeds, samples, positions, streams, num).to(torch.float64) + 0.5) * 2.0**-32


def scalars(seed: int, sample: int, position: int, stream: int, num: int) -> list[float]:
    """`num` uniforms in (0, 1) of 52 bits on the host, two words each; `seed` as given, 0 <= seed < 2**64.

    For the few coins of the rejection rule: no tensor, and finer than the rarest token of a large vocabulary.
    """
    key = (seed & _MASK, seed >> 32 & _MASK)
    out: list[float] = []
    for index in range(-(-num // 2)):
        w0, w1, w2, w3 = philox4x32((index, position, sample, stream), key)
        out += [((high << 20 | low >> 12) + 0.5) * 2.0**-52 for high, low in ((w0, w1), (w2, w3))]
    return out[:num]


def gumbel(
    seeds: Tensor, samples: Tensor, positions: Tensor, vocab_size: int, streams: int | Tensor = Purpose.MATCH
) -> Tensor:
    """Standard Gumbel noise `-log(-log(u))` by token id: (R, V) float64; arguments as `words`."""
    return uniform(seeds, samples, positions, streams, vocab_size).log_().neg_().log_().neg_()
