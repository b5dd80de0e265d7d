"""The target: one forward pass over a flat batch whose every row has the same bits whatever its neighbours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from outrider.cache.pages import Pages, PageSpec
from outrider.kernels.base import Kernels, KeyIndex, Linear
from outrider.models.batch import FlatBatch, TargetOutput

if TYPE_CHECKING:
    from outrider.models.probe import ProbeReport
    from outrider.models.ranks.lead import Lead

FIXED_WIDTH = 16
"""Rows of every pass of a Transformers module: libraries choose other sums at other widths (DESIGN: invariance)."""


class Model(Protocol):
    """What both ways through a pass offer: the lean layers and the Transformers module."""

    page_specs: list[PageSpec]
    nbytes: int
    numerics: str

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        keys: KeyIndex,
        pages: Pages,
        logit_rows: Tensor | None = None,
        num_layers: int | None = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """T rows -> logits (M, V_padded) float32 of `logit_rows` (None: all), taps (T, H) float32 by layer."""

    def embed(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of the embedding, before whatever a module scales them by: (T,) int64 -> (T, H) float32."""

    def head_rows(self, ids: Tensor | None) -> Linear:
        """The output head of the ids (n,) int64 alone: (T, H) -> (T, n); None: of all, padding included."""

    def rotary(self) -> tuple[Tensor, Tensor]:
        """cos and sin by position, (P, D_rot / 2) float32 each; D_rot = 0 where the model does not rotate one way."""

    def last_norm(self) -> tuple[Tensor, float] | None:
        """What the RMS norm before the output head multiplies by, (H,) float32, and its eps; None for another norm."""


@dataclass(frozen=True, slots=True)
class Original:
    """The model that a widened twin was made of, as far as its drafters are bound to it; the fields are a target's.

    Attributes:
        plan: what it was widened by, a name of `config.WIDENINGS`.
    """

    name: str
    plan: str
    config: Any
    hidden_size: int
    num_layers: int
    vocab_size: int
    tokenizer: Any


@dataclass(eq=False, slots=True)
class Target:
    """A loaded model with its tokenizer and all that the engine needs to know of it.

    Attributes:
        way: "lean" (our own layers and packed weights) or "module" (Transformers' module).
        dtype: "float32", "bfloat16", "int8" or "packed". page_dtype: of keys and values.
        vocab_size: number of ids that may be emitted; logits are cut to it where the embedding is padded.
        eos_ids: tokens that end a text. max_positions: most positions of one request.
        fixed_width: rows of every pass, or None where any width gives the same bits.
        exactness: "seed", or "distribution" where a probe found that rows depend on their neighbours.
        numerics: one phrase for people. notes: what they should know (a context cut short, a fallback).
        tokenizer, config: Transformers' own. report: what the probe at load found, None if it was left out.
        original: what it is a widened twin of (`models/widen`), None for a model as it is.
        lead: tells the other ranks what to do, where `model` is the first one's part; None for a whole model.
    """

    name: str
    way: str
    dtype: str
    device: torch.device
    model: Model
    kernels: Kernels
    tokenizer: Any
    config: Any
    vocab_size: int
    eos_ids: frozenset[int]
    max_positions: int
    hidden_size: int
    page_dtype: torch.dtype
    fixed_width: int | None
    exactness: str = "seed"
    notes: list[str] = field(default_factory=list)
    report: ProbeReport | None = None
    original: Original | None = None
    lead: Lead | None = None

    @property
    def page_specs(self) -> list[PageSpec]:
        return self.model.page_specs

    @property
    def num_layers(self) -> int:
        return len(self.model.page_specs)

    @property
    def nbytes(self) -> int:
        return self.model.nbytes

    @property
    def numerics(self) -> str:
        return self.model.numerics

    @property
    def all_notes(self) -> list[str]:
        """`notes`, and what was found out in passes since."""
        graphs = getattr(self.model, "graphs", None)
        return [*self.notes, graphs.note] if graphs is not None and graphs.note else self.notes

    def make_pages(self, num_slots: int, num_layers: int | None = None) -> Pages:
        """A stack of `num_slots` slots for all layers, or for the first `num_layers`; slot 0 belongs to nobody."""
        stack = self.page_specs[:num_layers], num_slots, self.page_dtype, self.device
        return Pages(*stack) if self.lead is None else self.lead.pages(*stack)

    @torch.inference_mode()
    def forward(
        self, batch: FlatBatch, pages: Pages, num_layers: int | None = None, taps: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Run T rows: write their keys and values, and give the logits asked for.

        A row's bits depend on its token, its position and the keys before it only. With a `fixed_width` W the rows run
        in passes of exactly W: wider batches are split in row order (a row's keys are written by rows at or before
        it), the last pass is filled with rows that write to slot 0 and see nothing else.

        Args:
            num_layers: run only the first so many layers, then the model's own norm and head.
            taps: layers (from 0) whose output is wanted.

        Raises:
            ModelError: if `num_layers` exceeds the model.
        """
        if self.fixed_width is None:
            logits, tapped = self._pass(batch, pages, num_layers, taps)
            return TargetOutput(self._cut(logits), tapped)
        if batch.num_rows <= self.fixed_width:
            return self._one_pass(batch, pages, num_layers, taps)
        rows = list(range(batch.num_rows)) if batch.logit_rows is None else batch.logit_rows.tolist()
        logits = torch.empty(len(rows), self.vocab_size, device=self.device)
        asked: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by pass: (place in the output, row of the pass)
        for place, row in enumerate(rows):
            asked[row // self.fixed_width].append((place, row % self.fixed_width))
        tapped = {layer: torch.empty(batch.num_rows, self.hidden_size, device=self.device) for layer in taps}
        for start, count, part in _passes(batch, self.fixed_width):
            inside = asked.get(start // self.fixed_width)
            out, taken = self._run(part, bool(inside), pages, num_layers, taps)
            if inside:
                places, local = zip(*inside, strict=True)
                logits[list(places)] = out[list(local), : self.vocab_size]
            for layer, states in taken.items():
                tapped[layer][start : start + count] = states[:count]
        return TargetOutput(logits, tapped)

    def _one_pass(self, batch: FlatBatch, pages: Pages, num_layers: int | None, taps: tuple[int, ...]) -> TargetOutput:
        """A batch that fits into one padded pass: nothing waits for the device.

        What is kept is copied, since a pass under a graph writes its results over those of the last.
        """
        assert self.fixed_width is not None
        ((_, count, part),) = _passes(batch, self.fixed_width)
        rows = batch.logit_rows
        out, taken = self._run(part, rows is None or rows.numel() > 0, pages, num_layers, taps)
        logits = out[:count].clone() if rows is None else out[rows]
        return TargetOutput(self._cut(logits), {layer: states[:count].clone() for layer, states in taken.items()})

    def _run(
        self, part: FlatBatch, logits: bool, pages: Pages, num_layers: int | None, taps: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """One padded pass; the head, too, runs at one width: over all of its rows, or over none."""
        wanted = None if logits else part.tokens.new_empty(0)
        return self._pass(replace(part, logit_rows=wanted), pages, num_layers, taps)

    def _pass(
        self, batch: FlatBatch, pages: Pages, num_layers: int | None, taps: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """One pass of the model, by all ranks that have a part of it."""
        keys, rows = batch.keys, batch.logit_rows
        with self.lead.passing(batch, pages, num_layers, taps) if self.lead else nullcontext():
            return self.model.forward(batch.tokens, batch.positions, batch.slots, keys, pages, rows, num_layers, taps)

    def _cut(self, logits: Tensor) -> Tensor:
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size].contiguous()


def _passes(batch: FlatBatch, width: int) -> Iterator[tuple[int, int, FlatBatch]]:
    """Cut a batch into passes of exactly `width` rows: (first row, rows of the batch in it, pass)."""
    for start in range(0, batch.num_rows, width):
        count = min(width, batch.num_rows - start)
        stop, missing = start + count, width - count
        keys = batch.keys

        def part(values: Tensor, fill: int, start: int = start, stop: int = stop, missing: int = missing) -> Tensor:
            padding = (0, 0) * (values.dim() - 1) + (0, missing)
            return nn.functional.pad(values[start:stop], padding, value=fill) if missing else values[start:stop]

        # A filling row has one key, its own, in slot 0.
        index = replace(
            keys,
            request=part(keys.request, 0),
            linear=part(keys.linear, 0),
            tails=part(keys.tails, 0),
            length=part(keys.length, 1),
        )
        yield (
            start,
            count,
            FlatBatch(part(batch.tokens, 0), part(batch.positions, 0), part(batch.slots, 0), index, None),
        )
