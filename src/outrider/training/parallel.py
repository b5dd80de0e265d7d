"""DFlash's own form of a block: its rows see one another both ways, and stand for the tokens at their own positions.

Source: DFlash (2602.06036) and z-lab/dflash. It is weaker than `block`, but vLLM, SGLang and TensorRT-LLM read it.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.nn.functional import linear as project

from outrider.training.base import Counts, DraftModule
from outrider.training.block import DECAY, Layer, counts_of, drawn, rotating, through
from outrider.training.corpus import Batch
from outrider.training.harvest import Features
from outrider.training.layers import Shape, final_norm, linear, norm, shifted


class Parallel(DraftModule):
    """Row 0 is the anchor, the last known token x_j; rows i >= 1 are masks. Row i predicts x_{j+i}, row 0 nothing.

    Args:
        block_size: rows of a block. num_layers: decoder layers. num_anchors: blocks drawn from each conversation.
    """

    kept_index: Tensor
    mask: Tensor

    def __init__(
        self, shape: Shape, kept_ids: Tensor, block_size: int = 8, num_layers: int = 3, num_anchors: int = 64
    ) -> None:
        super().__init__(shape, kept_ids)
        hidden = shape.hidden
        self.num_levels, self.num_anchors = max(1, block_size - 1), num_anchors
        first, last = min(1, shape.num_layers - 1), max(0, shape.num_layers - 3)
        self.taps = tuple(sorted({round(first + (last - first) * i / 4) for i in range(5)}))
        self.fc = linear(len(self.taps) * hidden, hidden)
        self.ctx_norm = nn.RMSNorm(hidden, shape.eps)
        self.layers = nn.ModuleList(Layer(shape, num_layers, normed=True) for _ in range(num_layers))
        self.final_norm = nn.RMSNorm(hidden, shape.eps)
        self.mask_token_id = 0
        self.register_buffer("mask", torch.zeros(hidden))
        table = torch.full((shape.vocab_size,), -1)
        table[kept_ids.long().cpu()] = torch.arange(len(kept_ids))
        self.register_buffer("kept_index", table, persistent=False)

    @classmethod
    def initialise(cls, module: Any, kept_ids: Tensor, **settings: Any) -> Self:
        """The last norm begins as the target's; masks have the target's input row of the token that ends a text.

        Raises:
            ModelError: for a target without rotary positions.
        """
        made = cls(rotating(module), kept_ids, **settings).to(module.device)
        ends = module.config.get_text_config(decoder=True).eos_token_id
        ends = ends[0] if isinstance(ends, list) else ends
        made.mask_token_id = int(ends or 0)
        with torch.no_grad():
            made.final_norm.weight.copy_(final_norm(module))
            made.mask.copy_(module.get_input_embeddings().weight[made.mask_token_id])
        return made

    def settings(self) -> dict[str, Any]:
        return {
            "taps": list(self.taps),
            "vocabulary": len(self.kept_ids),
            "block_size": self.num_levels + 1,
            "num_layers": len(self.layers),
            "sees": "both ways",
            "taps_normed": "no",
            "heads_normed": True,
            "mask_token_id": self.mask_token_id,
        }

    def fusible(self) -> list[tuple[nn.Module, str]]:
        return [(layer, part) for layer in self.layers for part in ("keys", "query", "finish")]

    def loss(self, batch: Batch, features: Features) -> tuple[Tensor, Counts]:
        """Divergence by row, weighted exp(-i / 4).

        A row counts where its token lies in the reply and all tokens of the block before it are kept ids: others are
        never reached.
        """
        offsets = drawn(batch, self.num_anchors)
        levels = torch.arange(self.num_levels, device=offsets.device)
        steps = offsets[..., None] + levels  # (B, A, K): number of each guess within the reply
        inside = steps < (batch.lengths - batch.replies)[:, None, None]
        entries = torch.where(inside, batch.firsts[:, None, None] + steps, 0)
        places = (batch.replies - 1)[:, None, None] + steps  # positions of the tokens before each guess
        tokens = batch.tokens.gather(1, places.clamp_max(batch.tokens.shape[1] - 1).flatten(1)).view_as(places)
        known = (self.kept_index[tokens] >= 0) | (levels == 0)
        counted = inside & known.cumprod(dim=-1).bool()
        states = self._run(batch, features, tokens[..., 0], places[..., 0])
        score = features.arithmetic.score(
            lambda state: project(state, features.head, features.bias), (states,), features.law.at(entries.flatten())
        )
        weights = (-levels / DECAY).exp() * counted
        loss = (score.loss.view_as(weights) * weights).sum() / weights.sum().clamp_min(1e-6)
        return loss, counts_of(score.hit.view_as(inside), score.alpha.view_as(inside), counted, inside)

    def _run(self, batch: Batch, features: Features, anchors: Tensor, starts: Tensor) -> Tensor:
        """Normed states of the rows that guess: anchor tokens and their positions (B, A) -> (B * A * K, H)."""
        assert features.cos is not None
        assert features.sin is not None
        eps, width, size = self.shape.eps, batch.tokens.shape[1], self.num_levels + 1
        read = self.fc(torch.cat([shifted(features.taps[tap]).to(self.fc.weight.dtype) for tap in self.taps], dim=-1))
        context = norm(read, self.ctx_norm.weight, eps)
        whole = (features.cos[None, None, :width], features.sin[None, None, :width])
        # As entries stand one position later than what was read, so do the rows.
        places = starts[..., None] + 1 + torch.arange(size, device=starts.device)
        flat = places.flatten(1).clamp_max(len(features.cos) - 1)
        own = (features.cos[flat][:, None], features.sin[flat][:, None])
        visible = _visible(starts, size, width)
        anchor_rows = embedding(anchors, features.embedding).float()[:, :, None]
        mask_rows = self.mask.expand(*anchors.shape, self.num_levels, -1)
        states = torch.cat([anchor_rows, mask_rows], dim=2).flatten(1, 2)
        states = through(self.layers, states, context, (whole, own), visible, eps)
        guessing = states.unflatten(1, (-1, size))[:, :, 1:]
        return norm(guessing, self.final_norm.weight, eps).flatten(0, 2)


def _visible(starts: Tensor, size: int, width: int) -> Tensor:
    """(B, 1, A * size, S + A * size) bool: a row sees the context up to its anchor, and its whole block.

    Nobody sees entry 0, which has no taps.
    """
    batch, anchors = starts.shape
    entries = torch.arange(width, device=starts.device)
    context = (entries <= starts[..., None, None]) & (entries > 0)
    context = context.expand(batch, anchors, size, width).flatten(1, 2)
    rows = torch.arange(anchors * size, device=starts.device) // size
    own = rows[:, None] == rows
    return torch.cat([context, own.expand(batch, -1, -1)], dim=2)[:, None]
