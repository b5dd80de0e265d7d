"""The block drafter served: all guessed positions in one pass over injected target features, corrected along the block.

Sources: DFlash (2602.06036); DSpark (2607.05147), whose anchor predicts, with the Markov correction and the confidence
head; JetSpec (2606.18394), whose mask is causal inside the block, so that a block may be cut to any depth. Row i of a
block after n known tokens stands at position n - 1 + i and predicts x_{n + i}.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.models.heads.files import Artefact
from outrider.models.heads.stage import Buffers, Rows, pack
from outrider.models.heads.trunk import Blocks, Trunk
from outrider.models.target import Target

BLOCK_SIZE = 8
"""Rows of a block where the artefact does not say."""


class BlockHead(Trunk):
    """The layers, the Markov correction and the confidence head; attributes as `Trunk` has them."""

    later = -1
    """A block begins at the last known token's position, beside that token's own context entry."""

    def __init__(self, artefact: Artefact, target: Target, kind: str | None = None) -> None:
        super().__init__(artefact, target, BLOCK_SIZE, kind)
        parts = self.parts
        hidden = parts.hidden
        self._index = _places(self.kept_ids, target)
        self._adapter = parts.linear(["adapter"], hidden, hidden)
        num_kept = self.kept_ids.shape[0]
        self._markov_in = parts.floats("markov_in.weight", num_kept, None)
        self._markov_out = parts.linear(["markov_out"], num_kept, self._markov_in.shape[1])
        self._markov_gate = parts.linear(["markov_gate"], self._markov_in.shape[1], hidden)
        self._markov_carry = parts.linear(["markov_carry"], self._markov_in.shape[1], self._markov_in.shape[1])
        self._confidence = pack(parts.floats("confidence_state", hidden)[None], self._kernels, target.device, "float32")
        self._confidence_prev = parts.floats("confidence_prev", self._markov_in.shape[1])
        self._confidence_bias = float(parts.floats("confidence_bias", 1))
        self.nbytes = parts.nbytes

    def buffers(self) -> dict[str, tuple[int, ...]]:
        return {"adapted": (self._target.hidden_size,), "gate": (self._markov_in.shape[1],)}

    def finish(self, b: Buffers) -> None:
        self._adapter(b["state"], out=b["adapted"])
        self._markov_gate(b["state"], out=b["gate"])

    def blocks(self, anchors: Tensor, starts: Tensor, rows: Rows) -> Blocks:
        """Run the T rows of A blocks; see `Trunk.run`."""
        room = self.run(anchors, starts, rows)
        confidence = self._confidence(room["state"])[:, 0] + self._confidence_bias
        return Blocks(self._head(room["adapted"]), 1 + room["gate"], confidence)

    def corrected(
        self, blocks: Blocks, places: Tensor, previous: Tensor, codes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What rows of the blocks say after the tokens before them.

        places, previous: (P,) int64, the rows, and the last token before each, a kept id. codes: (P, r) float32 of
        what lies before that token, as this gave it there, zeros where it is the block's first.

        Returns:
            Logits (P, V_d), how far to trust each (the expected `1 - TV(p, q)`): (P,) float32, and the codes with the
            tokens in them.
        """
        kept = self._index.index_select(0, previous)
        codes = self._markov_carry(codes.tanh(), residual=self._markov_in.index_select(0, kept))
        before = codes * blocks.gate.index_select(0, places)
        logits = self._markov_out(before, residual=blocks.logits.index_select(0, places))
        return logits, _trust(blocks.confidence.index_select(0, places) + before @ self._confidence_prev), codes

    def no_codes(self, count: int) -> Tensor:
        """(count, r) float32, of blocks in which nothing is guessed yet."""
        return self._markov_in.new_zeros(count, self._markov_in.shape[1])

    def anchored(self, blocks: Blocks, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the blocks' rows 0, which no guess precedes."""
        return blocks.logits[starts], _trust(blocks.confidence[starts])


def _trust(scores: Tensor) -> Tensor:
    """A confidence that is no number is none."""
    return torch.sigmoid(scores).nan_to_num(nan=0.0)


def _places(kept_ids: Tensor, target: Target) -> Tensor:
    """(V,) int64: where each target id stands among the kept ones; 0 for the others, which are never guessed."""
    places = torch.zeros(target.vocab_size, dtype=torch.int64, device=kept_ids.device)
    places[kept_ids] = torch.arange(kept_ids.shape[0], device=kept_ids.device)
    return places
