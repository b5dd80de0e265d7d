"""The block drafter served: all guessed positions in one pass over injected target features, corrected along the block.

Sources: DFlash (2602.06036), whose features enter as keys and values; DSpark (2607.05147), whose anchor predicts, with
the Markov correction and the confidence head; JetSpec (2606.18394), whose mask is causal inside the block, so that a
block may be cut to any depth. The context entry at position j uses the taps of position j - 1 (zeros for j = 0); row i
of a block after n known tokens stands at position n - 1 + i and predicts x_{n + i}.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.pages import Pages, PageSpec
from outrider.errors import ModelError
from outrider.kernels.base import Linear
from outrider.models.heads.files import Artefact, check_target
from outrider.models.heads.layer import Attention, Mlp, Parts
from outrider.models.heads.stage import Buffers, Rows, Stage, pack
from outrider.models.target import Target

BLOCK_SIZE = 8
"""Rows of a block where the artefact does not say."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One pre-norm decoder layer; `kv` makes keys and values of context entries, `qkv` all three of block rows."""

    input_norm: Tensor
    qkv: Linear
    kv: Linear
    o: Linear
    mlp: Mlp
    attention: Attention


@dataclass(frozen=True, slots=True)
class Blocks:
    """What one pass over the T rows of some blocks gives.

    Attributes:
        logits: (T, V_d) float32, before any correction. gate: (T, r), what the states make of the code of the token
            before. confidence: (T,), what the states alone say of it.
    """

    logits: Tensor
    gate: Tensor
    confidence: Tensor


class BlockHead:
    """The layers, the Markov correction and the confidence head.

    Attributes:
        taps: target layers it reads. stack: its layers' pages. kept_ids: (V_d,) int64. block_size: most rows.

    Raises:
        ModelError: if the artefact was trained for another target or is not whole.
    """

    def __init__(self, artefact: Artefact, target: Target, kind: str | None = None) -> None:
        """kind: of the packed weights; see `stage.pack`."""
        check_target(artefact, target)
        parts = Parts(artefact, target, kind)
        hidden = parts.hidden
        self.taps: tuple[int, ...] = artefact.taps(target.num_layers)
        self.block_size: int = artefact.size("block_size", BLOCK_SIZE)
        self.kept_ids = artefact.kept_ids().to(target.device)
        self._index = _places(self.kept_ids, target)
        self._target = target
        self._kernels = target.kernels
        self._eps = parts.eps
        self._fused = parts.fused_taps(len(self.taps))
        self._ctx_norm = parts.floats("ctx_norm.weight", hidden)
        self._mask = parts.floats("mask", hidden)
        self._layers = [_layer(parts, index) for index in range(_num_layers(artefact))]
        self.stack: tuple[PageSpec, ...] = tuple(layer.attention.page for layer in self._layers)
        self._final_norm = parts.floats("final_norm.weight", hidden)
        self._adapter = parts.linear(["adapter"], hidden, hidden)
        self._head = parts.kept_head()
        num_kept = self.kept_ids.shape[0]
        self._markov_in = parts.floats("markov_in.weight", num_kept, None)
        self._markov_out = parts.linear(["markov_out"], num_kept, self._markov_in.shape[1])
        self._markov_gate = parts.linear(["markov_gate"], self._markov_in.shape[1], hidden)
        self._markov_carry = parts.linear(["markov_carry"], self._markov_in.shape[1], self._markov_in.shape[1])
        self._confidence = pack(parts.floats("confidence_state", hidden)[None], self._kernels, target.device, "float32")
        self._confidence_prev = parts.floats("confidence_prev", self._markov_in.shape[1])
        self._confidence_bias = float(parts.floats("confidence_bias", 1))
        self.nbytes = parts.nbytes

    def place(self, pages: Pages) -> None:
        """Its keys live in `pages`."""
        hidden, width = self._target.hidden_size, len(self.taps) * self._target.hidden_size
        device, page = self._target.device, self._layers[0].attention.page
        self._pages = pages
        context = {
            "taps": (width,),
            "normed": (width,),
            "fused": (hidden,),
            "context": (hidden,),
            "kv": (2 * page.num_kv_heads * page.key_dim,),
            "none": (0, page.key_dim),
        }
        self._context = Stage(self._kernels, device, context, self._run_context)
        block = {
            "x": (hidden,),
            "normed": (hidden,),
            "state": (hidden,),
            "adapted": (hidden,),
            "gate": (self._markov_in.shape[1],),
            **self._layers[0].attention.buffers(),
            **self._layers[0].mlp.buffers(),
        }
        self._block = Stage(self._kernels, device, block, self._run_block)

    def write_context(self, taps: Tensor, rows: Rows) -> None:
        """Write the keys of T context entries from the raw taps (T, n H) of the positions before."""
        self._context.room(taps.shape[0])["taps"].copy_(taps)
        self._context.run(rows)

    def blocks(self, anchors: Tensor, starts: Tensor, rows: Rows) -> Blocks:
        """Run the T rows of A blocks, one after the other; all but each one's row 0 are masks.

        anchors: (A,) int64, the last known tokens. starts: (A,) int64, where each block's row 0 stands.
        """
        room = self._block.room(rows.positions.shape[0])
        room["x"].copy_(self._mask.expand_as(room["x"]))
        room["x"][starts] = self._target.model.embed(anchors)
        self._block.run(rows)
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

    def _run_context(self, b: Buffers, rows: Rows) -> None:
        kernels = self._kernels
        self._fused.apply(kernels, b["taps"], b["normed"], b["fused"])
        kernels.rms_norm(b["fused"], self._ctx_norm, self._eps, out=b["context"])
        for index, layer in enumerate(self._layers):
            k_pages, v_pages = self._pages.keys[index], self._pages.values[index]
            layer.kv(b["context"], out=b["kv"])
            attention = layer.attention
            kernels.rotate_and_write(
                b["kv"], attention.cos, attention.sin, rows.positions, rows.slots, k_pages, v_pages, 0, out=b["none"]
            )

    def _run_block(self, b: Buffers, rows: Rows) -> None:
        kernels, eps = self._kernels, self._eps
        for index, layer in enumerate(self._layers):
            kernels.rms_norm(b["x"], layer.input_norm, eps, out=b["normed"])
            layer.qkv(b["normed"], out=b["qkv"])
            mixed = layer.attention.attend(kernels, b, rows, self._pages.keys[index], self._pages.values[index])
            layer.o(mixed, residual=b["x"], out=b["x"])
            layer.mlp.apply(kernels, b, b["x"], b["normed"])
        kernels.rms_norm(b["x"], self._final_norm, eps, out=b["state"])
        self._adapter(b["state"], out=b["adapted"])
        self._markov_gate(b["state"], out=b["gate"])


def _trust(scores: Tensor) -> Tensor:
    """A confidence that is no number is none."""
    return torch.sigmoid(scores).nan_to_num(nan=0.0)


def _num_layers(artefact: Artefact) -> int:
    numbers = {name.split(".")[1] for name in artefact.tensors if name.startswith("layers.")}
    if not numbers:
        raise ModelError(f"the {artefact.drafter} drafter has no layers: train it again")
    return len(numbers)


def _layer(parts: Parts, index: int) -> _Layer:
    prefix, hidden = f"layers.{index}.", parts.hidden
    attention = parts.attention(prefix)
    return _Layer(
        parts.floats(f"{prefix}input_norm.weight", hidden),
        parts.linear([f"{prefix}{part}_proj" for part in "qkv"], None, hidden),
        parts.linear([f"{prefix}{part}_proj" for part in "kv"], None, hidden),
        parts.linear([f"{prefix}o_proj"], hidden, attention.num_heads * attention.page.key_dim),
        parts.mlp(prefix),
        attention,
    )


def _places(kept_ids: Tensor, target: Target) -> Tensor:
    """(V,) int64: where each target id stands among the kept ones; 0 for the others, which are never guessed."""
    places = torch.zeros(target.vocab_size, dtype=torch.int64, device=kept_ids.device)
    places[kept_ids] = torch.arange(kept_ids.shape[0], device=kept_ids.device)
    return places
