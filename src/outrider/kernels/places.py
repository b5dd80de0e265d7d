"""Where the rows of a pass stand when only the device knows how far its requests have got."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOTHING = -2
"""The token of a row that is none: no draw is this one, so no walk steps there."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far R requests have got.

    Attributes:
        lengths: (R,) int64, known tokens n. ends: (R,) int64, tokens at which each is over. tables: (R, B) int32, zeros
            behind the blocks that are held, so that a slot past them lies in the block that belongs to nobody.
    """

    lengths: Tensor
    ends: Tensor
    tables: Tensor
    block_size: int


@dataclass(frozen=True, slots=True)
class Relative:
    """X rows of each request, counted from its last known token, which stands at position n - 1.

    A row is live where its token is one of the vocabulary, it is no deeper than `deepest` and before its request's end.

    Attributes:
        tokens: (R, X) int64. depths: (R, X) int64, row's position less n - 1. places: (R, X) int64, where in the
            sequence its key is written, less n - 1. paths: (R, X, D) int64, places of the guesses down to the row.
        deepest: (R,) int64. are_known: no guesses; each sees the known tokens up to itself, and `paths` are not read.
    """

    tokens: Tensor
    depths: Tensor
    places: Tensor
    paths: Tensor
    deepest: Tensor
    are_known: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """T = R * X rows, those of a request side by side; see `FlatBatch` and `KeyIndex` for what each stands for.

    Rows that are not live fill the pass: token 0 at position 0, which writes to slot 0 and sees nothing else.

    Attributes:
        named: (T,) int64, the token, or `NOTHING`. tokens: (T,) int64. tails: (T, D) int32. All else: (T,) int32.
    """

    named: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    request: Tensor
    linear: Tensor
    length: Tensor
    tails: Tensor


class PlainPlaceVerbs:
    """The twin in plain PyTorch; see `Kernels`."""

    def place(self, standing: Standing, rows: Relative, vocab_size: int) -> Placed:
        """See `Kernels.place`."""
        num, width = rows.tokens.shape
        known, size, device = standing.lengths[:, None], standing.block_size, rows.tokens.device
        live = (rows.tokens >= 0) & (rows.tokens < vocab_size) & (rows.depths <= rows.deepest[:, None])
        live &= known + rows.depths < standing.ends[:, None]

        def slots(places: Tensor) -> Tensor:
            columns = (places // size).clamp(0, standing.tables.shape[1] - 1)
            return standing.tables.gather(1, columns) * size + places % size

        def flat(values: Tensor, fill: int = 0) -> Tensor:
            return torch.where(live, values, fill).to(torch.int32).flatten()

        positions = known - 1 + rows.depths
        paths = (known[:, :, None] - 1 + rows.paths).flatten(1)
        tails = torch.where(live[:, :, None], slots(paths).view(num, width, -1), 0)
        return Placed(
            named=torch.where(live, rows.tokens, NOTHING).flatten(),
            tokens=torch.where(live, rows.tokens, 0).flatten(),
            positions=flat(positions),
            slots=flat(slots(known - 1 + rows.places)),
            request=torch.arange(num * width, dtype=torch.int32, device=device) // width,
            linear=flat(positions + 1 if rows.are_known else known.expand_as(live)),
            length=flat(positions + 1, 1),
            tails=tails.to(torch.int32).flatten(0, 1),
        )
