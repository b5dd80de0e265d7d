"""A block drafter: all guessed positions in one pass over injected target features, corrected along the block.

Sources: DFlash (2602.06036) for the injection of features as keys and values; DSpark (2607.05147) for the anchor that
predicts, the low-rank Markov correction and the confidence head; JetSpec (2606.18394) for the causal mask inside the
block, so that a block cut short has the same logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding
from torch.nn.functional import linear as project

from outrider.errors import ModelError
from outrider.training.base import Counts, DraftModule, refuse_unknown
from outrider.training.corpus import Batch
from outrider.training.harvest import Features
from outrider.training.layers import QUIET, Shape, attend, final_norm, gated, linear, norm, normed_taps, rotate

DECAY = 4.0
"""Row i counts exp(-i / DECAY): gamma of DFlash for blocks of 8."""


class Layer(nn.Module):
    """One pre-norm decoder layer whose block rows also attend to keys and values made of the target's features.

    Args:
        normed: whether queries and keys are normed head by head, as Qwen3's are.
    """

    def __init__(self, shape: Shape, num_layers: int, normed: bool = False) -> None:
        super().__init__()
        hidden, heads, kv_heads = shape.hidden, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.shape = shape
        gain = (2 * num_layers) ** -0.5
        self.input_norm = nn.RMSNorm(hidden, shape.eps)
        self.post_norm = nn.RMSNorm(hidden, shape.eps)
        self.q_proj = linear(hidden, heads)
        self.k_proj = linear(hidden, kv_heads)
        self.v_proj = linear(hidden, kv_heads)
        self.o_proj = linear(heads, hidden, gain)
        self.gate_proj = linear(hidden, shape.intermediate)
        self.up_proj = linear(hidden, shape.intermediate)
        self.down_proj = linear(shape.intermediate, hidden, gain)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.eps) if normed else None
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.eps) if normed else None

    def keys(self, states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, H) -> rotated keys and values, (B, h_kv, T, D) each."""
        return rotate(self._split(self.k_proj(states), self.k_norm), cos, sin), self._split(self.v_proj(states))

    def query(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self._split(self.q_proj(states), self.q_norm), cos, sin)

    def finish(self, states: Tensor, mixed: Tensor) -> Tensor:
        states = states + self.o_proj(mixed)
        middle = norm(states, self.post_norm.weight, self.shape.eps)
        return states + gated(middle, self.gate_proj, self.up_proj, self.down_proj)

    def _split(self, states: Tensor, scale: nn.RMSNorm | None = None) -> Tensor:
        heads = states.unflatten(-1, (-1, self.shape.head_dim))
        heads = heads if scale is None else norm(heads, scale.weight, self.shape.eps)
        return heads.transpose(1, 2)


class Block(DraftModule):
    """Row 0 is the anchor, the last known token x_j; rows i >= 1 are learned masks. Row i predicts x_{j+1+i}.

    Args:
        block_size: rows of a block. num_layers: decoder layers. markov_rank: of the correction by the tokens before:
            the last one's code and what is carried over from those before it (`markov_carry`), which the row's own
            state amplifies or silences (`markov_gate`).
        num_anchors: blocks drawn from each conversation's reply for one batch.
        plain: not 0 for DFlash's own form (`parallel`): weaker, but other engines read it; it has no `markov_rank`.
    """

    kept_index: Tensor

    def __init__(
        self,
        shape: Shape,
        kept_ids: Tensor,
        block_size: int = 8,
        num_layers: int = 3,
        markov_rank: int = 128,
        num_anchors: int = 64,
        plain: int = 0,
    ) -> None:
        assert not plain
        super().__init__(shape, kept_ids)
        hidden = shape.hidden
        self.num_levels, self.num_anchors, self.markov_rank = block_size, num_anchors, markov_rank
        first, last = min(1, shape.num_layers - 1), max(0, shape.num_layers - 3)
        self.taps = tuple(round(first + (last - first) * i / 4) for i in range(5))
        self.tap_norms = nn.Parameter(torch.ones(len(self.taps), hidden))
        self.fc = linear(len(self.taps) * hidden, hidden)
        self.ctx_norm = nn.RMSNorm(hidden, shape.eps)
        self.mask = nn.Parameter(torch.randn(hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(shape, num_layers) for _ in range(num_layers))
        self.final_norm = nn.RMSNorm(hidden, shape.eps)
        self.adapter = nn.Linear(hidden, hidden, bias=False)
        self.markov_in = nn.Embedding(len(kept_ids), markov_rank)
        nn.init.normal_(self.markov_in.weight, std=markov_rank**-0.5)
        self.markov_out = nn.Linear(markov_rank, len(kept_ids), bias=False)
        nn.init.zeros_(self.markov_out.weight)
        self.markov_gate = nn.Linear(hidden, markov_rank, bias=False)
        nn.init.zeros_(self.markov_gate.weight)
        self.markov_carry = nn.Linear(markov_rank, markov_rank, bias=False)
        nn.init.zeros_(self.markov_carry.weight)
        self.confidence_state = nn.Parameter(torch.zeros(hidden))
        self.confidence_prev = nn.Parameter(torch.zeros(markov_rank))
        self.confidence_bias = nn.Parameter(torch.zeros(1))
        table = torch.full((shape.vocab_size,), -1)
        table[kept_ids.long().cpu()] = torch.arange(len(kept_ids))
        self.register_buffer("kept_index", table, persistent=False)

    @classmethod
    def initialise(cls, module: Any, kept_ids: Tensor, **settings: Any) -> DraftModule:  # type: ignore[override]
        """The last norm begins as the target's, the adapter as a small identity.

        Raises:
            ModelError: for a target without rotary positions. ConfigError: for a size that the plain form has not.
        """
        if settings.pop("plain", 0):
            from outrider.training.parallel import Parallel

            refuse_unknown(Parallel, settings)
            return Parallel.initialise(module, kept_ids, **settings)
        shape = rotating(module)
        made = cls(shape, kept_ids, **settings).to(module.device)
        with torch.no_grad():
            made.final_norm.weight.copy_(final_norm(module))
            made.adapter.weight.copy_(torch.eye(shape.hidden) * QUIET)
        return made

    def settings(self) -> dict[str, Any]:
        return {
            "taps": list(self.taps),
            "vocabulary": len(self.kept_ids),
            "block_size": self.num_levels,
            "num_layers": len(self.layers),
            "markov_rank": self.markov_rank,
        }

    def fusible(self) -> list[tuple[nn.Module, str]]:
        return [(layer, part) for layer in self.layers for part in ("keys", "query", "finish")]

    def loss(self, batch: Batch, features: Features) -> tuple[Tensor, Counts]:
        """Divergence by row, weighted exp(-i / 4), plus the cross-entropy of the confidence with what is accepted.

        A row counts where its token lies in the reply and all tokens of the block before it are kept ids: others are
        never reached. The token before a row is the true one.
        """
        offsets = drawn(batch, self.num_anchors)
        levels = torch.arange(self.num_levels, device=offsets.device)
        steps = offsets[..., None] + levels  # (B, A, K): number of each row's predicted token within the reply
        inside = steps < (batch.lengths - batch.replies)[:, None, None]
        entries = torch.where(inside, batch.firsts[:, None, None] + steps, 0)
        places = (batch.replies - 1)[:, None, None] + steps  # positions of the rows
        tokens = batch.tokens.gather(1, places.clamp_max(batch.tokens.shape[1] - 1).flatten(1)).view_as(places)
        before = torch.where(levels > 0, self.kept_index[tokens], -1)
        known = before >= 0
        counted = inside & (known | (levels == 0)).cumprod(dim=-1).bool()

        states = self._run(batch, features, tokens[..., 0], places)
        codes = self._codes(self.markov_in(before.clamp_min(0)) * known[..., None])
        correction = codes.flatten(0, 2) * (1 + self.markov_gate(states))
        score = features.arithmetic.score(
            lambda state, moved: project(self.adapter(state), features.head, features.bias) + self.markov_out(moved),
            (states, correction),
            features.law.at(entries.flatten()),
        )
        confidence = states @ self.confidence_state + correction @ self.confidence_prev + self.confidence_bias
        errors = binary_cross_entropy_with_logits(confidence.float(), score.alpha.clamp(0, 1), reduction="none")
        weights = (-levels / DECAY).exp() * counted
        loss = ((score.loss + errors).view_as(weights) * weights).sum() / weights.sum().clamp_min(1e-6)
        return loss, counts_of(score.hit.view_as(inside), score.alpha.view_as(inside), counted, inside)

    def _codes(self, tokens: Tensor) -> Tensor:
        """Codes of the tokens before each row (B, A, K, r), zeros before row 0, to those of the block so far."""
        codes = [tokens[:, :, 0]]
        for row in range(1, self.num_levels):
            codes.append(tokens[:, :, row] + self.markov_carry(codes[-1].tanh()))
        return torch.stack(codes, dim=2)

    def _run(self, batch: Batch, features: Features, anchors: Tensor, places: Tensor) -> Tensor:
        """Normed states of all rows: anchor tokens (B, A) and positions of rows (B, A, K) -> (B * A * K, H)."""
        assert features.cos is not None
        assert features.sin is not None
        eps, width = self.shape.eps, batch.tokens.shape[1]
        taps = normed_taps(features.taps, self.taps, self.tap_norms, eps)
        context = norm(self.fc(torch.cat(taps, dim=-1)), self.ctx_norm.weight, eps)
        whole = (features.cos[None, None, :width], features.sin[None, None, :width])
        flat = places.flatten(1).clamp_max(len(features.cos) - 1)
        own = (features.cos[flat][:, None], features.sin[flat][:, None])
        visible = _visible(places, width)
        anchor_rows = embedding(anchors, features.embedding).float()[:, :, None]
        mask_rows = self.mask.expand(*places.shape[:2], self.num_levels - 1, -1)
        states = torch.cat([anchor_rows, mask_rows], dim=2).flatten(1, 2)
        states = through(self.layers, states, context, (whole, own), visible, eps)
        return norm(states, self.final_norm.weight, eps).flatten(0, 1)


def through(
    layers: nn.ModuleList,
    states: Tensor,
    context: Tensor,
    rotations: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    visible: Tensor,
    eps: float,
) -> Tensor:
    """Rows through all layers, each of which sees the text's states (B, T, H) and the rows: (B, X, H) -> (B, X, H).

    rotations: cos and sin of the text's positions, and of the rows'. visible: as `attend` takes it, the text first.
    """
    whole, own = rotations
    for layer in layers:
        assert isinstance(layer, Layer)
        normed = norm(states, layer.input_norm.weight, eps)
        pairs = zip(layer.keys(context, *whole), layer.keys(normed, *own), strict=True)
        key, value = (torch.cat(pair, dim=2) for pair in pairs)
        states = layer.finish(states, attend(layer.query(normed, *own), key, value, visible))
    return states


def _visible(places: Tensor, width: int) -> Tensor:
    """(B, 1, A * K, S + A * K) bool: a row sees the context up to its anchor, and its block up to itself.

    Nobody sees entry 0, which has no taps.
    """
    batch, anchors, levels = places.shape
    entries = torch.arange(width, device=places.device)
    context = (entries <= places[:, :, :1, None]) & (entries > 0)
    context = context.expand(batch, anchors, levels, width).flatten(1, 2)
    rows = torch.arange(anchors * levels, device=places.device)
    own = (rows[:, None] // levels == rows // levels) & (rows[:, None] >= rows)
    return torch.cat([context, own.expand(batch, -1, -1)], dim=2)[:, None]


def counts_of(hit: Tensor, alpha: Tensor, counted: Tensor, inside: Tensor) -> Counts:
    """Counts by level of (B, A, K) rows; a chain that a token beyond the kept ids ends has not hit."""

    def sums(values: Tensor) -> Tensor:
        return values.double().sum(dim=(0, 1))

    return Counts(
        rows=sums(counted),
        hits=sums(hit & counted),
        alpha=sums(alpha * counted),
        starts=sums(inside),
        chains=sums((hit & counted).cumprod(dim=-1)),
    )


def drawn(batch: Batch, count: int) -> Tensor:
    """Anchors, spread over each reply: (B, A) int64, number of the token that row 0 predicts within the reply."""
    device = batch.tokens.device
    generator = torch.Generator(device).manual_seed(batch.seed)
    spread = torch.rand(len(batch.tokens), count, generator=generator, device=device)
    spread = (spread + torch.arange(count, device=device)) / count
    counts = (batch.lengths - batch.replies)[:, None]
    return torch.minimum((spread * counts).long(), counts - 1)


def rotating(module: Any) -> Shape:
    """The shape of a target whose positions are rotated in one way.

    Raises:
        ModelError: for any other.
    """
    shape = Shape.of(module)
    if shape.rotary_tables(module) is None:
        raise ModelError(
            f"{module.config.model_type} has no one table of rotary positions: train medusa or small_model instead"
        )
    return shape
