"""The twins in plain PyTorch: each defines its kernel, and serves where there is no compiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from outrider.errors import KernelError
from outrider.kernels.base import KeyIndex, Linear
from outrider.kernels.graph_pool import SharesGraphs
from outrider.kernels.noise import gumbel
from outrider.kernels.packing import GROUP
from outrider.kernels.plain_linear import PlainLinear, into
from outrider.kernels.tree import PlainTreeVerbs

BLOCK = 256
"""Positions that attention takes at a time."""


class PlainKernels(PlainTreeVerbs, SharesGraphs):
    """PyTorch's own operations, run in tiles of exactly `width` rows: libraries choose other sums at other widths."""

    name = "plain"
    fixed_width: int | None = None
    wide: tuple[int, ...] = ()

    def __init__(self, device: torch.device, width: int = 16, note: str | None = None) -> None:
        """note: why these serve where others were wanted."""
        self.device, self.width, self.note = device, width, note

    def in_tiles(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """`function` over the rows, `width` of them at a time, the last tile filled up with zeros."""
        num_rows = rows[0].shape[0]
        if num_rows == self.width:
            return function(*rows)
        parts = []
        for start in range(0, max(num_rows, 1), self.width):
            tile = [r[start : start + self.width] for r in rows]
            missing = self.width - tile[0].shape[0]
            parts.append(function(*(nn.functional.pad(t, (0, 0) * (t.dim() - 1) + (0, missing)) for t in tile)))
        return torch.cat(parts)[:num_rows]

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """(N, K) float32 or bfloat16 -> Linear of the same kind."""
        kind = str(weight.dtype).removeprefix("torch.")
        if kind not in ("float32", "bfloat16"):
            raise KernelError(f"weights of {weight.dtype} have no kernel: convert them to float32 or bfloat16")
        return PlainLinear(self, kind, weight.detach(), bias=bias)

    def pack_quantised(
        self, kind: str, quants: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None = None
    ) -> Linear:
        """See `Kernels.pack_quantised`.

        Raises:
            KernelError: if K is no multiple of 32.
        """
        if kind != "int8" and quants.shape[1] % GROUP:
            raise KernelError(f"quantised rows of {quants.shape[1]} are not whole groups of 32: choose dtype float32")
        return PlainLinear(self, kind, quants, scales.float(), None if minima is None else minima.float(), bias)

    def record(self) -> None:
        """Every verb runs at once."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x: (T, H) float32, weight: (H,) float32 -> (T, H) float32."""
        return into(self.in_tiles(lambda t: _norm(t, weight, eps), x), out)

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """gate_up: (T, 2 * I) float32, gate first -> silu(gate) * up: (T, I) float32."""
        return into(self.in_tiles(lambda t: nn.functional.silu(t.chunk(2, 1)[0]) * t.chunk(2, 1)[1], gate_up), out)

    def gelu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """As `silu_mul`, with gelu in its tanh form."""

        def gelu(t: Tensor) -> Tensor:
            gate, up = t.chunk(2, 1)
            return nn.functional.gelu(gate, approximate="tanh") * up

        return into(self.in_tiles(gelu, gate_up), out)

    def rotate_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        num_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Kernels.rotate_and_write`."""
        kv_heads, dim = k_pages.shape[1:]
        q, k, v = qkv.unflatten(1, (-1, dim)).split([num_heads, kv_heads, kv_heads], dim=1)
        if q_norm is not None:
            q = self.in_tiles(lambda t: _norm(t, q_norm, eps), q.contiguous())
        if k_norm is not None:
            k = self.in_tiles(lambda t: _norm(t, k_norm, eps), k.contiguous())
        c, s = cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1)
        q, k = self.in_tiles(_rotate, q, c, s), self.in_tiles(_rotate, k, c, s)
        kept = (slots >= 0).nonzero().squeeze(1)
        places = slots[kept].long()
        k_pages[places] = k[kept].to(k_pages.dtype)
        v_pages[places] = v[kept].to(v_pages.dtype)
        return into(q, out)

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
        skip_first: bool = False,
    ) -> Tensor:
        """See `Kernels.attention`: blocks of 256 positions, merged in order."""
        q = q.float()
        last = max(int(keys.length.max()), 1) if keys.length.numel() else 1
        positions = torch.arange(-(-last // BLOCK) * BLOCK, dtype=torch.int32, device=q.device)
        length = keys.length.unsqueeze(1)
        visible = positions < length
        if window is not None:
            visible &= positions >= length - window
        if skip_first:
            visible &= (positions > 0) | (length == 1)
        slots = _slots(keys, positions).where(visible, 0)

        def attend(q: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
            return _attend(q, k_pages, v_pages, slots, visible, scale, softcap, sinks)

        return into(self.in_tiles(attend, q, slots, visible), out)

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """See `Kernels.draw`."""
        tokens = torch.full((logits.shape[0],), -1, dtype=torch.int64, device=logits.device)
        for row in range(logits.shape[0]):
            values = logits[row].double()
            if temperature[row] != 0:
                here = slice(row, row + 1)
                noise = gumbel(seeds[here], samples[here], positions[here], logits.shape[1])[0]
                values = values / temperature[row].double() + noise
            top = values.max()
            if not torch.isnan(top) and top != -torch.inf:
                tokens[row] = (values == top).nonzero()[0, 0]  # argmax promises no order among ties
        return tokens

    def rank(
        self,
        logits: Tensor,
        count: int,
        temperature: Tensor,
        seeds: Tensor,
        samples: Tensor,
        positions: Tensor,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernels.rank`."""
        scores = logits.double()
        masses = torch.logsumexp(scores, dim=1)
        hot = temperature.nonzero()[:, 0]
        if len(hot):
            vocab_size = logits.shape[1] if ids is None else int(ids[-1]) + 1
            noise = gumbel(seeds[hot], samples[hot], positions[hot], vocab_size)
            noise = noise if ids is None else noise[:, ids]
            scores[hot] = scores[hot] / temperature[hot].double().unsqueeze(1) + noise
        scores = torch.where(scores.isnan().any(dim=1, keepdim=True), torch.nan, scores)
        found = torch.topk(scores, min(count, scores.shape[1]))
        columns, order = found.indices.sort(dim=1)  # topk promises no order among ties
        best, back = found.values.gather(1, order).sort(dim=1, descending=True, stable=True)
        return best, columns.gather(1, back).where(best > -torch.inf, -1), masses

    def gumbel(self, seeds: Tensor, samples: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        """See `Kernels.gumbel`."""
        return gumbel(seeds, samples, positions, vocab_size)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def _slots(keys: KeyIndex, positions: Tensor) -> Tensor:
    """(T, P) int64 slot of every row's key at every position; arbitrary where a row has none."""
    tables = keys.tables.long()[keys.request.long()]
    block = (positions // keys.block_size).long().clamp(max=tables.shape[1] - 1)
    linear = tables[:, block] * keys.block_size + positions % keys.block_size
    behind = positions.unsqueeze(0) - keys.linear.unsqueeze(1)
    tails = keys.tails.long().gather(1, behind.long().clamp(0, keys.tails.shape[1] - 1))
    return torch.where(behind < 0, linear, tails)


def _attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One tile of rows: (W, Hq, D), slots and visible (W, P), P a multiple of `BLOCK` -> (W, Hq, D)."""
    width, num_heads, dim = q.shape
    kv_heads = k_pages.shape[1]
    grouped = q.view(width, kv_heads, num_heads // kv_heads, dim)
    top = q.new_full((*grouped.shape[:3], 1), -torch.inf)
    if sinks is not None:
        top = sinks.view(1, kv_heads, -1, 1).expand_as(top).clone()
    total = torch.where(top == -torch.inf, 0.0, 1.0)
    values = torch.zeros_like(grouped)
    for start in range(0, slots.shape[1], BLOCK):
        at = slots[:, start : start + BLOCK]
        k = k_pages[at].float().permute(0, 2, 3, 1)  # (W, Hkv, D, BLOCK)
        v = v_pages[at].float().transpose(1, 2)
        scores = grouped @ k * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible[:, None, None, start : start + BLOCK], -torch.inf)
        largest = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        # A block without a visible key must change no bit, and -inf - -inf is NaN.
        safe = torch.where(largest == -torch.inf, 0.0, largest)
        weights, shrink = torch.exp(scores - safe), torch.exp(top - safe)
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        values = values * shrink + weights @ v
        top = largest
    return (values / torch.where(total == 0, 1.0, total)).flatten(1, 2)
