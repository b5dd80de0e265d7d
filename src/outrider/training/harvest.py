"""The frozen target, run once a batch: hidden states of the layers asked for, and its law where a reply is learnt."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from outrider.errors import ModelError
from outrider.models.module import find_layers
from outrider.training.corpus import Batch
from outrider.training.layers import Shape
from outrider.training.losses import Arithmetic, Law


@dataclass(frozen=True, slots=True)
class Features:
    """What a draft module learns from, for one batch of (B, S) tokens.

    Attributes:
        taps: output of each layer asked for, (B, S, H). law: the target's law at the batch's N entries.
        embedding: (V, H) and head: (V_d, H), the target's own rows, frozen. bias: (V_d,) of that head, None where it
            has none. cos, sin: (P, D / 2) float32 rotary tables, None for a target without them. arithmetic: how to
            score.
    """

    taps: dict[int, Tensor]
    law: Law
    embedding: Tensor
    head: Tensor
    bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    arithmetic: Arithmetic


@dataclass(eq=False)
class Harvester:
    """Runs a Transformers causal language model over batches, without gradients, and keeps nothing.

    Attributes:
        module: on its device, in the float type it is to run in; it is frozen, and set to `sdpa` attention
            where it has that.
        kept_ids: (V_d,) target ids that the drafter knows, ascending. taps: layers (from 0) to harvest.
        vocab_size: ids that may be emitted; logits beyond, of a padded embedding, are cut off.

    Raises:
        ModelError: if the module has no input embedding and output head of the usual kind.
    """

    module: Any
    kept_ids: Tensor
    taps: tuple[int, ...]
    vocab_size: int
    arithmetic: Arithmetic = field(default_factory=Arithmetic)

    def __post_init__(self) -> None:
        self.module.set_attn_implementation("sdpa" if self.module._supports_sdpa else "eager")
        self.module.eval().requires_grad_(False)
        text = self.module.config.get_text_config(decoder=True)
        self.shape = Shape.of(self.module)
        self._layers = find_layers(self.module, text.num_hidden_layers)[1]
        head = self.module.get_output_embeddings()
        if head is None or getattr(head, "weight", None) is None:
            raise ModelError(f"{type(self.module).__name__} has no output head to learn from: choose a causal model")
        self._embedding = self.module.get_input_embeddings().weight.detach()
        self.kept_ids = self.kept_ids.to(self._embedding.device, torch.int64)
        self._head = head.weight.detach()[self.kept_ids]
        bias = getattr(head, "bias", None)
        self._bias = None if bias is None else bias.detach()[self.kept_ids]
        self._places = self.kept_ids.new_full((self.vocab_size,), -1)
        self._places[self.kept_ids] = torch.arange(len(self.kept_ids), device=self.device)
        self._body = getattr(self.module, self.module.base_model_prefix)
        tables = self.shape.rotary_tables(self.module)
        self._cos: Tensor | None
        self._sin: Tensor | None
        self._cos, self._sin = tables if tables is not None else (None, None)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def fuse(self) -> None:
        """Run each layer and the arithmetic by `torch.compile`; the layers are alike and share one compilation."""
        for layer in self._layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        self.arithmetic = self.arithmetic.fused()

    def unfuse(self) -> None:
        """Run everything as it was written again."""
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self.arithmetic = Arithmetic(self.arithmetic.kind, self.arithmetic.chunk)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Features:
        """Harvest one batch on the module's device."""
        with _tapped(self._layers, self.taps) as taps:
            hidden = self._body(input_ids=batch.tokens, use_cache=False)[0]
        return Features(
            taps=taps,
            law=self._law(hidden.flatten(0, 1)[batch.rows]),
            embedding=self._embedding,
            head=self._head,
            bias=self._bias,
            cos=self._cos,
            sin=self._sin,
            arithmetic=self.arithmetic,
        )

    def _law(self, hidden: Tensor) -> Law:
        """The law after N hidden states (N, H), the whole vocabulary's logits alive for one chunk at a time."""
        parts = [
            self.arithmetic.summarise(self._logits(part), self.kept_ids) for (part,) in self.arithmetic.chunks(hidden)
        ]
        kept, log_z, top = (torch.cat(columns)[: len(hidden)] for columns in zip(*parts, strict=True))
        return Law(kept, log_z, self._places[top])

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits (n, V) of hidden states (n, H), by the module's own forward with its body replaced by the states.

        Whatever a model does after its head (a scale, a soft cap) is done here too.
        """
        view = copy.copy(self.module)
        view._modules = {**self.module._modules, self.module.base_model_prefix: _Given(hidden[None])}
        blank = self.kept_ids.new_zeros(1, len(hidden))
        logits: Tensor = view(input_ids=blank, use_cache=False).logits[0]
        return logits[:, : self.vocab_size]


class _Given(nn.Module):
    """A body that has already run."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    @property
    def decoder(self) -> _Given:
        """OPT's head asks this part of its body."""
        return self

    def forward(self, *_args: Any, **_kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self._hidden)


@contextmanager
def _tapped(layers: nn.ModuleList, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs (B, S, H) of the layers asked for while the block runs."""
    tapped: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tapped[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [layers[layer].register_forward_hook(keep(layer)) for layer in taps]
    try:
        yield tapped
    finally:
        for hook in hooks:
            hook.remove()
