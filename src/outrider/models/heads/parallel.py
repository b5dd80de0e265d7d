"""DFlash's own form of a block, served: every row sees the whole block, and stands for the token at its own position.

Source: DFlash (2602.06036) and z-lab/dflash. The first row is the last known token and guesses nothing, so that a block
of K rows guesses K - 1 tokens, and all of them run whatever depth is asked for. A context entry stands one position
later than theirs, as every entry here does, and so do the rows: only distances count.
"""

from __future__ import annotations

from torch import Tensor

from outrider.models.heads.files import Artefact
from outrider.models.heads.stage import Rows
from outrider.models.heads.trunk import Blocks, Trunk
from outrider.models.target import Target


class ParallelHead(Trunk):
    """The layers and the head, without a correction by what is guessed before; attributes as `Trunk` has them."""

    whole = True
    lead = 1

    def __init__(self, artefact: Artefact, target: Target, kind: str | None = None) -> None:
        super().__init__(artefact, target, None, kind)
        self.nbytes = self.parts.nbytes

    def blocks(self, anchors: Tensor, starts: Tensor, rows: Rows) -> Blocks:
        """Run the T rows of A blocks; see `Trunk.run`."""
        states = self.run(anchors, starts, rows)["state"]
        none = states.new_zeros(states.shape[0], 0)
        return Blocks(self._head(states), none, none)

    def corrected(
        self, blocks: Blocks, places: Tensor, previous: Tensor, codes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockHead.corrected`: what rows say is not corrected, and trusted as it is."""
        return blocks.logits.index_select(0, places), codes.new_ones(places.shape[0]), codes

    def no_codes(self, count: int) -> Tensor:
        """(count, 0) float32."""
        return self._mask.new_zeros(count, 0)

    def anchored(self, blocks: Blocks, starts: Tensor) -> tuple[Tensor, Tensor]:
        """What the first rows that guess say."""
        logits, trust, _ = self.corrected(blocks, starts, starts, self.no_codes(starts.shape[0]))
        return logits, trust
