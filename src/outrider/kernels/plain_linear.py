"""The linear in plain PyTorch, of every kind of weights: it defines what the others multiply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.kernels.packing import GROUP

if TYPE_CHECKING:
    from outrider.kernels.plain import PlainKernels


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(T, K) float32 -> values (T, 2 G, 16) in -127..127 as float32, scales and centres (T, 2 G).

    x ~ scale * value + centre in groups of 16, half of a weight's group; the extremes of a group become -127 and 127,
    and halves round to even.
    """
    groups = x.unflatten(1, (-1, GROUP // 2))
    high, low = groups.amax(dim=2), groups.amin(dim=2)
    centres, reach = (high + low) * 0.5, (high - low) * 0.5
    inverse = torch.where(reach > 0, 127.0 / reach, torch.zeros_like(reach))
    return ((groups - centres.unsqueeze(2)) * inverse.unsqueeze(2)).round(), reach / 127.0, centres


class PlainLinear:
    """Weights as they were given; see `Linear`."""

    input_dtype = torch.float32

    def __init__(
        self,
        kernels: PlainKernels,
        kind: str,
        weight: Tensor,
        scales: Tensor | None = None,
        minima: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        self.kind = kind
        self.out_features, self.in_features = weight.shape
        self.nbytes = sum(t.nbytes for t in (weight, scales, minima, bias) if t is not None)
        self._kernels = kernels
        self._weight, self._scales, self._minima = weight, scales, minima
        self._bias = None if bias is None else bias.detach().float()

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x: (T, K) float32 -> (T, N) float32; `residual` (T, N) is added last."""
        product = self._floats if self._scales is None else self._channels if self.kind == "int8" else self._integers
        y = self._kernels.in_tiles(product, x)
        if self._bias is not None:
            y = y + self._bias
        return into(y if residual is None else y + residual, out)

    def _floats(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._weight.float())

    def _channels(self, x: Tensor) -> Tensor:
        assert self._scales is not None
        return nn.functional.linear(x.bfloat16().float(), self._weight.float()) * self._scales

    def _integers(self, x: Tensor) -> Tensor:
        """Integer products are exact, so only undoing the rounding and the sum over groups round."""
        assert self._scales is not None
        values, scales, centres = quantise_rows(x)
        weight = self._weight.float().unflatten(1, (-1, GROUP // 2))
        totals = scales * values.sum(dim=2) + GROUP // 2 * centres
        y = x.new_zeros(x.shape[0], self.out_features)
        for g in range(self._scales.shape[1]):
            part = torch.zeros_like(y)
            for half in (2 * g, 2 * g + 1):
                part += (values[:, half] @ weight[:, half].T) * scales[:, half, None]
                part += weight[:, half].sum(dim=1) * centres[:, half, None]
            y += part * self._scales[:, g]
            if self._minima is not None:
                y += self._minima[:, g] * (totals[:, 2 * g] + totals[:, 2 * g + 1])[:, None]
        return y

    def draw(
        self,
        x: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        samples: Tensor,
        positions: Tensor,
        vocab_size: int | None = None,
    ) -> Tensor:
        """See `Linear.draw`."""
        logits = self(x)
        return self._kernels.draw(logits[:, :vocab_size], temperature, seeds, samples, positions)

    def lookup(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """tokens: (T,) int64 -> rows of w, dequantised exactly: (T, K) float32."""
        rows = self._weight[tokens].float()
        if self.kind == "int8":
            assert self._scales is not None
            rows = rows * self._scales[tokens].unsqueeze(1)
        elif self._scales is not None:
            rows = (rows.unflatten(1, (-1, GROUP)) * self._scales[tokens].unsqueeze(2)).flatten(1)
        if self._minima is not None:
            rows = rows + self._minima[tokens].repeat_interleave(GROUP, dim=1)
        return into(rows, out)

    def rows(self, ids: Tensor) -> PlainLinear:
        """A linear of the outputs `ids` (n,) int64 alone, with the very bits of their weights."""
        chosen = [None if t is None else t[ids] for t in (self._scales, self._minima, self._bias)]
        return PlainLinear(self._kernels, self.kind, self._weight[ids], *chosen)


def into(result: Tensor, out: Tensor | None) -> Tensor:
    """`result`, written to `out` where there is one."""
    return result if out is None else out.copy_(result)
