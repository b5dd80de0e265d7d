"""The Triton kernels for GPUs: paged attention and the keyed draw; every other verb is the plain twin's."""

from __future__ import annotations

from torch import Tensor

from outrider.kernels.base import KeyIndex
from outrider.kernels.plain import PlainKernels
from outrider.kernels.triton.attention import attend
from outrider.kernels.triton.draw import draw


class TritonKernels(PlainKernels):
    """What a pass of a Transformers module asks of its kernels, fused; a row's arithmetic is one program's own."""

    name = "triton"

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        keys: KeyIndex,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Kernels.attention`; nothing waits for the device, so that it can be captured in a graph."""
        return attend(q, k_pages, v_pages, keys, scale, window, softcap, sinks, out)

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """See `Kernels.draw`."""
        return draw(logits, temperature, seeds, samples, positions)
