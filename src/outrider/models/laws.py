"""The laws of those who are seated: what warps the rows of each, and what it has said, on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.kernels.warps import Fields, Steps, Warps

_TOP, _PENALISES, _WIDTH = 6, 7, 8
"""Columns of a seat's numbers; factors and bounds of its `Fields` stand before them."""
_COUNT, _FLAG = 4, 1
"""Bytes for a token of the vocabulary."""

Send = Callable[[Sequence[float], torch.dtype], Tensor]
"""Numbers on their way to the device."""


class Laws:
    """Of every seat: the numbers of its law, how often each token was said, and which ones its prompt holds.

    Args:
        num_seats: all of them.
    """

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._numbers = torch.tensor(_numbers(Fields()), dtype=torch.float64, device=device).repeat(num_seats, 1)
        self._counts = torch.zeros(num_seats, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(num_seats, vocab_size, dtype=torch.bool, device=device)

    @staticmethod
    def bytes_of(num_seats: int, vocab_size: int) -> int:
        return num_seats * (8 * _WIDTH + vocab_size * (_COUNT + _FLAG))

    def take(self, seat: int, fields: Fields, said: tuple[Tensor, Tensor] | None, send: Send) -> None:
        """A request sits down. said: of one that is penalised, its counts (V,) int32 and what its prompt holds (V,)
        bool; they are copied.
        """
        self._numbers[seat] = send(_numbers(fields), torch.float64)
        if said is not None:
            self._counts[seat], self._in_prompt[seat] = said

    def warps(self, index: Tensor, depths: Tensor, said: Tensor | None, steps: Steps) -> Warps:
        """How the rows of a cycle are to be warped, those of the seats `index` (R,) one after another.

        depths: (R, N + 1) int64, of each row below its root. said: (R * (N + 1), D) int64, the tokens down to each, of
        which as many count as it is deep; None where nothing is penalised.
        """
        device, count = index.device, depths.numel()
        seats = index[:, None].expand_as(depths).flatten()
        numbers = self._numbers.index_select(0, seats)
        rows = torch.arange(count, dtype=torch.int32, device=device)
        none = torch.zeros(1, dtype=torch.int32, device=device)
        edges = none.new_zeros(count, 4)
        addresses = torch.zeros(count, 2, dtype=torch.int64, device=device)
        ids = none
        if said is not None:
            first = rows * said.shape[1]
            last = first + depths.flatten().clamp(max=said.shape[1]).to(torch.int32)
            edges, ids = torch.stack([first, first, last, last], dim=1), said.to(torch.int32).flatten()
            counts = self._counts.data_ptr() + seats * (_COUNT * self._vocab_size)
            in_prompt = self._in_prompt.data_ptr() + seats * (_FLAG * self._vocab_size)
            addresses = torch.stack([counts, in_prompt], dim=1) * (numbers[:, _PENALISES:] > 0)
        return Warps(
            steps=steps,
            rows=rows,
            edges=edges,
            ids=ids,
            values=none.to(torch.float32),
            factors=numbers[:, :4].to(torch.float32),
            bounds=numbers[:, 4:_TOP].contiguous(),
            tops=numbers[:, _TOP].to(torch.int32),
            addresses=addresses,
            masks=none[:, None].to(torch.uint8),
            mask=torch.full((count,), -1, dtype=torch.int32, device=device),
        )

    def count(self, index: Tensor, said: Tensor, moved: Tensor) -> None:
        """Take in what the seats `index` (R,) said, those of them that `moved`: (R, K) int64, -1 behind the last."""
        new = (said >= 0) & moved[:, None]
        places = index[:, None] * self._vocab_size + said.clamp(min=0)
        self._counts.view(-1).index_add_(0, places.flatten(), new.flatten().to(torch.int32))


def _numbers(fields: Fields) -> tuple[float, ...]:
    return (*fields.factors, *fields.bounds, float(fields.top), float(fields.steps.penalises))
