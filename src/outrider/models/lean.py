"""The Llama-like layer on our own kernels: packed weights, fused projections, one call or one graph for all layers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.cache.pages import Pages, PageSpec
from outrider.kernels.base import GatedLinear, Kernels, KeyIndex, Linear, Program
from outrider.models.batch import FlatBatch
from outrider.models.fetch import Progress, silent
from outrider.models.graph import PassGraphs, bucket
from outrider.models.lean_layer import fill_layers, project
from outrider.models.lean_spec import LeanSpec, fits, rotary_tables, spec_of
from outrider.models.lean_weights import KEEP, Filling, GgufWeights, ModuleWeights, Weights, in_words
from outrider.models.ranks.group import Ranks
from outrider.models.ranks.join import Cut, Join


@dataclass(slots=True)
class _Buffers:
    """What the verbs of a pass write into, for up to `capacity` rows; None lets every verb make its own.

    x is the residual stream, read and written in place; the others die within their layer. What only linears read may
    be in the type to which they round it.
    """

    capacity: int = 0
    x: Tensor | None = None
    normed: Tensor | None = None
    qkv: Tensor | None = None
    q: Tensor | None = None
    mixed: Tensor | None = None
    gate_up: Tensor | None = None
    gated: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Recording:
    """The lookup, the layers over one stack of pages and the last norm; what comes out of tapped layers, by layer.

    cuts: where the program stops, because ranks add what they have.
    """

    program: Program
    tapped: dict[int, Tensor]
    cuts: tuple[Cut, ...]


class LeanModel:
    """A causal language model of Llama-like layers.

    Attributes:
        page_specs: per layer. nbytes: of all weights and tables. numerics: the arithmetic, in words.
    """

    def __init__(
        self,
        spec: LeanSpec,
        weights: Weights,
        kernels: Kernels,
        tables: tuple[Tensor, Tensor],
        ranks: Ranks | None = None,
        progress: Progress = silent,
    ) -> None:
        """ranks: those that have a part of it each; `spec` is then this rank's, but for the head, which is whole."""
        self.spec = spec
        self.kernels = kernels
        self.page_specs = [PageSpec(spec.num_kv_heads, spec.head_dim, spec.head_dim)] * spec.num_layers
        self._tables = tables
        self._layers = fill_layers(spec, weights, tables, progress)
        self._norm = weights.vector("model.norm")
        (self._embedding,) = weights.linears(["model.embed_tokens"])
        self._join = Join(ranks, self._embedding if spec.tied else weights.linears(["lm_head"])[0], spec.hidden)
        self._head = self._join.head
        linears = [p for layer in self._layers for p in (*layer.qkv, *layer.o, *layer.gate_up, *layer.down)]
        linears += [self._embedding] if self._head is self._embedding else [self._embedding, self._head]
        own = self._join.nbytes + sum(table.nbytes for table in tables)
        self.nbytes = sum(linear.nbytes for linear in linears) + own
        self.numerics = f"{in_words(linears)}, summed in float32 ({kernels.name} kernels)"
        self._rounds = all(linear.input_dtype == torch.bfloat16 for linear in linears)
        is_far = self._norm.device.type == "cuda"
        self.graphs = PassGraphs(kernels.graph_pool, ranks is not None) if is_far else None
        self._records = kernels.record() is not None
        self._buffers = _Buffers()
        self._recordings: WeakKeyDictionary[Pages, dict[tuple[int, tuple[int, ...]], _Recording]] = WeakKeyDictionary()

    @classmethod
    def from_module(
        cls, module: Any, kernels: Kernels, kind: str | None = None, ranks: Ranks | None = None, filling: Filling = KEEP
    ) -> LeanModel | None:
        """Fill the layers from a loaded Transformers model; None where they would not compute exactly what it does.

        kind: "int8" rounds the weights of linears; None keeps them. ranks: the module is this rank's part.
        """
        spec = spec_of(module.config)
        spec = spec.part(ranks.size) if spec is not None and ranks is not None else spec
        if spec is None or not fits(spec, module):
            return None
        with torch.inference_mode():
            tables = rotary_tables(module.model.rotary_emb, spec.max_positions, module.device)
            return cls(
                spec, ModuleWeights(module, kernels, kind, filling.consume), kernels, tables, ranks, filling.progress
            )

    @classmethod
    def from_gguf(cls, path: str | Path, config: Any, kernels: Kernels, told: Progress = silent) -> LeanModel | None:
        """Read a GGUF file of architecture "llama" (Q4_0, Q4_1, Q8_0, F16, BF16, F32), its bits kept as they are.

        config: the Transformers config of the same model. None where file and config do not fit the layers exactly.

        Raises:
            ModelError: if the file is damaged.
        """
        spec = spec_of(config)
        if spec is None:
            return None
        with torch.inference_mode():
            weights = GgufWeights(Path(path), spec, kernels)
            if not weights.fits:
                return None
            module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
            rotary = getattr(module, f"{spec.prefix}RotaryEmbedding")(config)
            tables = rotary_tables(rotary, spec.max_positions, torch.device("cpu"))
            return cls(spec, weights, kernels, tables, progress=told)

    @torch.inference_mode()
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
        """One pass over T rows.

        tokens: (T,) int64; positions, slots: (T,) int32; logit_rows: (M,) int64, None for all rows.

        Args:
            num_layers: run only the first so many layers, then the model's own norm and head.
            taps: layers (from 0, below `num_layers`) whose output is wanted.

        Returns:
            Logits (M, V) float32, and taps (T, H) float32 by layer.
        """
        depth, num_rows = self.spec.num_layers if num_layers is None else num_layers, tokens.shape[0]
        # A table is read there without a check; a GPU would have to be waited for.
        assert positions.device.type != "cpu" or max(positions.tolist()) < self.spec.max_positions
        batch = FlatBatch(tokens, positions, slots, keys, logit_rows)
        if self._records:
            normed, tapped = self._replay(batch, pages, depth, taps)
            normed = normed if logit_rows is None else normed[logit_rows]
            return self._join.logits(normed), tapped
        size = bucket(num_rows)
        if self.graphs is None or size is None:
            x, tapped = self._through(batch, pages, depth, taps)
        else:
            run = partial(self._through, depth=depth, taps=taps)
            x, written = self.graphs((depth, taps), run, batch, pages, size)
            tapped = {layer: states[:num_rows].clone() for layer, states in written.items()}
        hidden = x[:num_rows] if logit_rows is None else x[logit_rows]
        if hidden.shape[0]:
            hidden = self.kernels.rms_norm(hidden, self._norm, self.spec.eps, self._rounded(hidden))
        return self._join.logits(hidden), tapped

    def embed(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """(T,) int64 -> (T, H) float32."""
        return self._embedding.lookup(tokens, out)

    def head_rows(self, ids: Tensor | None) -> Linear:
        """The output head of the ids (n,) int64 alone: (T, H) -> (T, n); None: of all."""
        return self._head if ids is None else self._head.rows(ids)

    def roles(self) -> dict[str, list[Linear]]:
        """All linears by what they are for."""
        parts = ("qkv", "o", "gate_up", "down")
        return {
            **{part: [p for layer in self._layers for p in getattr(layer, part)] for part in parts},
            "head": [self._head],
        }

    def rotary(self) -> tuple[Tensor, Tensor]:
        """cos and sin by position: (P, D_rot / 2) float32 each."""
        return self._tables

    def last_norm(self) -> tuple[Tensor, float]:
        """See `Model.last_norm`."""
        return self._norm, self.spec.eps

    def _through(
        self, batch: FlatBatch, pages: Pages, depth: int, taps: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Through the first `depth` layers: (T, H), and what comes out of those in `taps`.

        Buffers are made anew for each pass, as a graph keeps what it was taken over.
        """
        positions, slots, keys = batch.positions, batch.slots, batch.keys
        buffers = self._fresh(batch.num_rows, pages.keys[0].dtype) if self._rounds else _Buffers()
        x = self._embedding.lookup(batch.tokens, out=buffers.x)
        tapped: dict[int, Tensor] = {}
        for i in range(depth):
            x = self._layer(i, x, buffers, positions, slots, keys, pages)
            if i in taps:
                tapped[i] = x.clone()
        return x, tapped

    def _replay(
        self, batch: FlatBatch, pages: Pages, depth: int, taps: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `_through`, and normed, in one native call."""
        count, buffers = batch.num_rows, self._room(batch.num_rows)
        assert buffers.normed is not None
        recording = self._recording(pages, buffers, depth, taps)
        program = recording.program
        start, operands = 0, (batch.positions, batch.slots, batch.keys, batch.tokens)
        for cut in recording.cuts:
            program.run(start, cut.at, *operands)
            start = self._join.at(cut, count)
        program.run(start, len(program), *operands)
        return buffers.normed[:count], {layer: states[:count].clone() for layer, states in recording.tapped.items()}

    def _layer(
        self, i: int, x: Tensor, out: _Buffers, positions: Tensor, slots: Tensor, keys: KeyIndex, pages: Pages
    ) -> Tensor:
        """x: (T, H) -> (T, H)."""
        layer, spec, kernels = self._layers[i], self.spec, self.kernels
        k_pages, v_pages = pages.keys[i], pages.values[i]
        normed = kernels.rms_norm(x, layer.input_norm, spec.eps, out=out.normed)
        qkv = project(layer.qkv, normed, out=out.qkv)
        q = kernels.rotate_and_write(
            qkv,
            layer.cos,
            layer.sin,
            positions,
            slots,
            k_pages,
            v_pages,
            spec.num_heads,
            layer.q_norm,
            layer.k_norm,
            spec.eps,
            out=out.q,
        )
        mixed = kernels.attention(q, k_pages, v_pages, keys, spec.head_dim**-0.5, layer.window, out=out.mixed)
        x = self._join.project(layer.o, mixed.flatten(1), x, out.x)
        normed = kernels.rms_norm(x, layer.post_norm, spec.eps, out=out.normed)
        if isinstance(layer.gate_up[0], GatedLinear) and len(layer.gate_up) == 1:
            gated = layer.gate_up[0].gated(normed, spec.activation, out=out.gated)
        else:
            gate = kernels.silu_mul if spec.activation == "silu" else kernels.gelu_mul
            gated = gate(project(layer.gate_up, normed, out=out.gate_up), out=out.gated)
        return self._join.project(layer.down, gated, x, out.x)

    def _room(self, num_rows: int) -> _Buffers:
        """Buffers for at least so many rows; recordings over smaller ones are dropped."""
        if self._buffers.capacity >= num_rows:
            return self._buffers
        spec = self.spec
        capacity = max(16, 1 << (num_rows - 1).bit_length())
        heads, width = spec.num_heads, spec.num_heads + 2 * spec.num_kv_heads
        self._buffers = _Buffers(
            capacity,
            x=torch.empty(capacity, spec.hidden),
            normed=torch.empty(capacity, spec.hidden),
            qkv=torch.empty(capacity, width * spec.head_dim),
            q=torch.empty(capacity, heads, spec.head_dim),
            mixed=torch.empty(capacity, heads, spec.head_dim),
            gate_up=torch.empty(capacity, 2 * spec.intermediate),
            gated=torch.empty(capacity, spec.intermediate),
        )
        self._recordings.clear()
        return self._buffers

    def _fresh(self, num_rows: int, page_dtype: torch.dtype) -> _Buffers:
        """Buffers for a pass of linears that round their inputs, as attention rounds its own to what pages hold."""
        spec = self.spec
        shapes = (spec.hidden,), (spec.num_heads, spec.head_dim), (spec.intermediate,)
        x = torch.empty(num_rows, spec.hidden, device=self._norm.device)
        normed, mixed, gated = (x.new_empty(num_rows, *shape, dtype=torch.bfloat16) for shape in shapes)
        q = torch.empty_like(mixed, dtype=page_dtype)
        return _Buffers(x=x, normed=normed, q=q, mixed=mixed, gated=gated)

    def _rounded(self, x: Tensor) -> Tensor | None:
        return torch.empty_like(x, dtype=torch.bfloat16) if self._rounds else None

    def _recording(self, pages: Pages, buffers: _Buffers, depth: int, taps: tuple[int, ...]) -> _Recording:
        """All of a pass over `pages` but the head.

        A tapped layer leaves the residual stream in a buffer of its own, where the next layer finds it: a call for each
        part between two taps would cost a fork and a join of all threads.
        """
        known = self._recordings.setdefault(pages, {})
        if (depth, taps) in known:
            return known[depth, taps]
        recorder = self.kernels.record()
        assert recorder is not None
        assert buffers.x is not None
        # Which rows run, and where their keys lie, is said at each run: these stand in for them.
        blank = torch.zeros(buffers.capacity, dtype=torch.int32)
        index = KeyIndex(blank[:, None], blank, blank, blank[:, None], blank, 1)
        tapped = {layer: torch.empty_like(buffers.x) for layer in sorted(taps)}
        with recorder as program, self._join.recording(program) as cuts:
            x = self._embedding.lookup(blank, out=buffers.x)
            for i in range(depth):
                out = replace(buffers, x=tapped[i]) if i in tapped else buffers
                x = self._layer(i, x, out, blank, blank, index, pages)
            self.kernels.rms_norm(x, self._norm, self.spec.eps, out=buffers.normed)
        known[depth, taps] = _Recording(program, tapped, tuple(cuts))
        return known[depth, taps]
