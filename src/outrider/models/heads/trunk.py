"""What block drafters share: layers over injected target features, and over the rows of a block that is to be guessed.

Source: DFlash (2602.06036), whose features enter as keys and values. The context entry at position j uses the taps of
position j - 1 (zeros for j = 0).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.cache.pages import Pages, PageSpec
from outrider.errors import ModelError
from outrider.kernels.base import Linear
from outrider.models.heads.files import Artefact, check_target
from outrider.models.heads.layer import Attention, Mlp, Parts
from outrider.models.heads.stage import Buffers, Rows, Stage
from outrider.models.target import Target


@dataclass(frozen=True, slots=True)
class Layer:
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
            before. confidence: (T,), what the states alone say of it. r = 0 and nothing where there is no correction.
    """

    logits: Tensor
    gate: Tensor
    confidence: Tensor


class Trunk:
    """The layers.

    Attributes:
        taps: target layers it reads. stack: its layers' pages. kept_ids: (V_d,) int64. block_size: most rows.
        whole: whether all rows of a block must run whatever depth is asked for.
        lead: rows before the first that guesses. later: added to the positions of guesses for those of its rows.
        last_position: of its rotary tables.

    Raises:
        ModelError: if the artefact was trained for another target or is not whole.
    """

    whole = False
    lead = 0
    later = 0

    def __init__(self, artefact: Artefact, target: Target, block_size: int | None, kind: str | None) -> None:
        """block_size: where the artefact does not say. kind: of the packed weights; see `stage.pack`."""
        check_target(artefact, target)
        self.parts = parts = Parts(artefact, target, kind)
        hidden = parts.hidden
        self.taps: tuple[int, ...] = artefact.taps(target.num_layers)
        self.block_size: int = artefact.size("block_size", block_size)
        self.kept_ids = artefact.kept_ids().to(target.device)
        self._target = target
        self._kernels = target.kernels
        self._eps = parts.eps
        self._embed = parts.embedding()
        self._fused = parts.fused_taps(len(self.taps))
        self._ctx_norm = parts.floats("ctx_norm.weight", hidden)
        self._mask = parts.floats("mask", hidden)
        self._layers = [_layer(parts, index) for index in range(_num_layers(artefact))]
        self.stack: tuple[PageSpec, ...] = tuple(layer.attention.page for layer in self._layers)
        self.last_position = self._layers[0].attention.cos.shape[0] - 1
        self._final_norm = parts.floats("final_norm.weight", hidden)
        self._head = parts.kept_head()

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
            **self.buffers(),
            **self._layers[0].attention.buffers(),
            **self._layers[0].mlp.buffers(),
        }
        self._block = Stage(self._kernels, device, block, self._run_block)

    def buffers(self) -> dict[str, tuple[int, ...]]:
        """Of what `finish` makes, by name: sizes of one row."""
        return {}

    def finish(self, b: Buffers) -> None:
        """Verbs over the normed states of all rows, in the buffer "state"."""

    def write_context(self, taps: Tensor, rows: Rows) -> None:
        """Write the keys of T context entries from the raw taps (T, n H) of the positions before."""
        self._context.room(taps.shape[0])["taps"].copy_(taps)
        self._context.run(rows)

    def run(self, anchors: Tensor, starts: Tensor, rows: Rows) -> Buffers:
        """The buffers after the T rows of A blocks, one after the other; all but each one's row 0 are masks.

        anchors: (A,) int64, the last known tokens. starts: (A,) int64, where each block's row 0 stands.
        """
        room = self._block.room(rows.positions.shape[0])
        room["x"].copy_(self._mask.expand_as(room["x"]))
        room["x"][starts] = self._embed(anchors)
        self._block.run(rows)
        return room

    def _run_context(self, b: Buffers, rows: Rows) -> None:
        kernels = self._kernels
        self._fused.apply(kernels, b["taps"], b["normed"], b["fused"])
        kernels.rms_norm(b["fused"], self._ctx_norm, self._eps, out=b["context"])
        for index, layer in enumerate(self._layers):
            layer.kv(b["context"], out=b["kv"])
            pages = self._pages.keys[index], self._pages.values[index]
            layer.attention.write(kernels, b["kv"], rows, *pages, 0, b["none"])

    def _run_block(self, b: Buffers, rows: Rows) -> None:
        kernels, eps = self._kernels, self._eps
        for index, layer in enumerate(self._layers):
            kernels.rms_norm(b["x"], layer.input_norm, eps, out=b["normed"])
            layer.qkv(b["normed"], out=b["qkv"])
            mixed = layer.attention.attend(kernels, b, rows, self._pages.keys[index], self._pages.values[index])
            layer.o(mixed, residual=b["x"], out=b["x"])
            layer.mlp.apply(kernels, b, b["x"], b["normed"])
        kernels.rms_norm(b["x"], self._final_norm, eps, out=b["state"])
        self.finish(b)


def _num_layers(artefact: Artefact) -> int:
    numbers = {name.split(".")[1] for name in artefact.tensors if name.startswith("layers.")}
    if not numbers:
        raise ModelError(f"the {artefact.drafter} drafter has no layers: train it again")
    return len(numbers)


def _layer(parts: Parts, index: int) -> Layer:
    prefix, hidden = f"layers.{index}.", parts.hidden
    attention = parts.attention(prefix)
    return Layer(
        parts.floats(f"{prefix}input_norm.weight", hidden),
        parts.linear([f"{prefix}{part}_proj" for part in "qkv"], None, hidden),
        parts.linear([f"{prefix}{part}_proj" for part in "kv"], None, hidden),
        parts.linear([f"{prefix}o_proj"], hidden, attention.num_heads * attention.page.key_dim),
        parts.mlp(prefix),
        attention,
    )
