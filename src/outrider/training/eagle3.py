"""EAGLE-3's head: one decoder layer over normed taps of three target layers, trained on its own feedback.

Sources: EAGLE-3 (Li et al., 2503.01840), training-time test in section 3.2; the norm before fusing and the fed-back
normed state are EAGLE 3.1's.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from torch.nn.functional import linear as project

from outrider.errors import ModelError
from outrider.training.base import Counts, DraftModule, before, combine
from outrider.training.corpus import Batch
from outrider.training.harvest import Features
from outrider.training.layers import QUIET, Shape, attend, final_norm, gated, linear, norm, normed_taps, rotate

DECAY = 0.8
"""Weight of each unrolled step against the one before (2503.01840)."""


class Eagle3(DraftModule):
    """The entry at position j holds token x_j and the taps of j - 1, and predicts x_{j+1}.

    Args:
        unroll: steps of the training-time test. Step s stands at position j + s, holds x_{j+s} and, for a feature, the
            normed state of step s - 1; it sees the true entries up to j and its own steps 1 .. s.
    """

    def __init__(self, shape: Shape, kept_ids: Tensor, unroll: int = 5) -> None:
        super().__init__(shape, kept_ids)
        hidden, heads, kv_heads = shape.hidden, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.num_levels = unroll
        self.taps = (min(2, shape.num_layers - 1), shape.num_layers // 2, max(0, shape.num_layers - 3))
        self.tap_norms = nn.Parameter(torch.ones(len(self.taps), hidden))
        self.fc = linear(len(self.taps) * hidden, hidden)
        self.embed_norm = nn.RMSNorm(hidden, shape.eps)
        self.feature_norm = nn.RMSNorm(hidden, shape.eps)
        self.q_proj = linear(2 * hidden, heads)
        self.k_proj = linear(2 * hidden, kv_heads)
        self.v_proj = linear(2 * hidden, kv_heads)
        self.o_proj = linear(heads, hidden, gain=0.5)
        self.post_norm = nn.RMSNorm(hidden, shape.eps)
        self.gate_proj = linear(hidden, shape.intermediate)
        self.up_proj = linear(hidden, shape.intermediate)
        self.down_proj = linear(shape.intermediate, hidden, gain=0.5)
        self.final_norm = nn.RMSNorm(hidden, shape.eps)
        self.head = linear(hidden, len(kept_ids))

    @classmethod
    def initialise(cls, module: Any, kept_ids: Tensor, **settings: Any) -> Self:
        """The head begins as the target's own rows, small, and its norm as the target's last.

        Raises:
            ModelError: for a target without rotary positions.
        """
        shape = Shape.of(module)
        if shape.rotary_tables(module) is None:
            raise ModelError(
                f"{module.config.model_type} has no one table of rotary positions: train medusa or small_model instead"
            )
        made = cls(shape, kept_ids, **settings).to(module.device)
        with torch.no_grad():
            made.head.weight.copy_(module.get_output_embeddings().weight[made.kept_ids.long()] * QUIET)
            made.final_norm.weight.copy_(final_norm(module))
        return made

    def settings(self) -> dict[str, Any]:
        return {"taps": list(self.taps), "vocabulary": len(self.kept_ids), "unroll": self.num_levels}

    def fusible(self) -> list[tuple[nn.Module, str]]:
        return [(self, "_project"), (self, "_finish")]

    def loss(self, batch: Batch, features: Features) -> tuple[Tensor, Counts]:
        assert features.cos is not None
        assert features.sin is not None
        eps, width = self.shape.eps, batch.tokens.shape[1]
        taps = normed_taps(features.taps, self.taps, self.tap_norms, eps)
        feature = self.fc(torch.cat(taps, dim=-1))
        visible = _visible(width, self.num_levels, batch.tokens.device)
        keys: tuple[Tensor, ...] = ()
        values: tuple[Tensor, ...] = ()
        scores = []
        for level in range(self.num_levels):
            token = embedding(pad(batch.tokens[:, level:], (0, level)), features.embedding)
            cos, sin = features.cos[level : level + width], features.sin[level : level + width]
            query, key, value = self._project(token, feature, cos, sin)
            keys, values = (*keys, key), (*values, value)
            mask = visible[:, : (level + 1) * width] if level else _alone(visible[:, :width])
            mixed = attend(query, torch.cat(keys, dim=2), torch.cat(values, dim=2), mask)
            feature = self._finish(feature, mixed)
            rows = before(feature, batch.rows, level)
            scores.append(
                features.arithmetic.score(lambda state: project(state, self.head.weight), (rows,), features.law)
            )
        return combine(scores, batch.offsets, [DECAY**level for level in range(self.num_levels)])

    def _project(self, token: Tensor, feature: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings and features (B, S, H) -> rotated query (B, h, S, D), rotated key and value (B, h_kv, S, D)."""
        eps = self.shape.eps
        fused = torch.cat(
            [norm(token, self.embed_norm.weight, eps), norm(feature, self.feature_norm.weight, eps)], dim=-1
        )
        query, key, value = (
            part(fused).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def _finish(self, feature: Tensor, mixed: Tensor) -> Tensor:
        """After attention (B, S, h * D): the residuals, the MLP, and the last norm -> the state fed back, (B, S, H)."""
        states = feature + self.o_proj(mixed)
        middle = norm(states, self.post_norm.weight, self.shape.eps)
        states = states + gated(middle, self.gate_proj, self.up_proj, self.down_proj)
        return norm(states, self.final_norm.weight, self.shape.eps)


def _visible(width: int, levels: int, device: torch.device) -> Tensor:
    """(S, levels * S) bool: entry j sees the true entries 1 .. j, and of each further step the one that began at j.

    Nobody sees entry 0, which has no taps.
    """
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    causal[:, 0] = False
    own = torch.eye(width, dtype=torch.bool, device=device)
    return torch.cat([causal, *[own] * (levels - 1)], dim=1)


def _alone(visible: Tensor) -> Tensor:
    """The same, where entry 0 sees itself, as it must see something."""
    made = visible.clone()
    made[0, 0] = True
    return made
