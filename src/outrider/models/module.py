"""A Transformers module run over a flat batch: any architecture, exactly as it was written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outrider.cache.pages import Pages, PageSpec
from outrider.errors import ModelError
from outrider.kernels.base import Kernels, KeyIndex, Linear
from outrider.models import quantised
from outrider.models.attention import NAME, FlatPass, LayerCall, blank_index, register
from outrider.models.batch import FlatBatch
from outrider.models.graph import PassGraphs
from outrider.models.lean_spec import rotary_tables

_EXPERTS = "batched_mm"
"""The experts implementation whose rows do not depend on which experts their neighbours chose."""


class ModuleModel:
    """A causal language model of Transformers, called with its keys and values in pages.

    Attributes:
        page_specs: per layer, found out by one recorded pass.
        nbytes: bytes of all weights, shared ones once.
    """

    def __init__(self, module: Any, kernels: Kernels) -> None:
        """Switches `module` to the paged attention function, and its experts (if any) to rows that stand alone.

        Raises:
            ModelError: if a layer does not call the function with the pass, or hides a sliding window.
        """
        register()
        self.module = module.eval()
        self.kernels = kernels
        self.config = module.config.get_text_config(decoder=True)
        self.layers_path, self.layers = find_layers(module, self.config.num_hidden_layers)
        module.set_attn_implementation(NAME)
        if module._can_set_experts_implementation():
            module.set_experts_implementation(_EXPERTS)
        self.calls = self._record_calls()
        self.page_specs: list[PageSpec] = [call.page for call in self.calls]
        self.nbytes = quantised.nbytes(module)
        weights = quantised.in_words(module)
        self.numerics = f"{weights} in Transformers' own module, attention summed in float32"
        self._views = {len(self.layers): module}
        # Without one the Python of a module takes longer than its arithmetic on a GPU.
        self.graphs = PassGraphs(kernels.graph_pool) if self.device.type == "cuda" else None

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def device(self) -> torch.device:
        return self.module.device

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
        """One pass over T rows -> logits (M, V_padded) float32, taps (T, H) float32 after the layers asked for.

        On a GPU the tensors hold until the next pass, where `logit_rows` asks for all rows or for none.
        """
        depth = len(self.layers) if num_layers is None else num_layers
        module = self._view(depth)

        def run(batch: FlatBatch, pages: Pages) -> tuple[Tensor, dict[int, Tensor]]:
            flat = FlatPass(batch.slots.long(), batch.keys, pages, self.kernels)
            with _tapped(self.layers, taps) as tapped:
                logits = self._call(module, batch.tokens, batch.positions, flat, batch.logit_rows)
            return logits, tapped

        batch = FlatBatch(tokens, positions, slots, keys, logit_rows)
        if self.graphs is None or (logit_rows is not None and logit_rows.numel()):
            return run(batch, pages)
        return self.graphs((depth, taps, logit_rows is None), run, batch, pages)

    def embed(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of the embedding, before whatever the module scales them by: (T,) int64 -> (T, H) float32."""
        rows = quantised.dense(self.module.get_input_embeddings().weight)[tokens].float()
        return rows if out is None else out.copy_(rows)

    def head_rows(self, ids: Tensor | None) -> Linear:
        """The output head of the ids (n,) int64 alone: (T, H) -> (T, n); None: of all, padding included.

        Raises:
            ModelError: for a module whose head is not one linear.
        """
        head = self.module.get_output_embeddings()
        if head is None or getattr(head, "weight", None) is None:
            raise ModelError(f"{type(self.module).__name__} has no output head of one linear: choose another drafter")
        bias = getattr(head, "bias", None)
        made = self.kernels.pack(quantised.dense(head.weight), bias if bias is None else bias.detach())
        return made if ids is None else made.rows(ids)

    @torch.inference_mode()
    def rotary(self) -> tuple[Tensor, Tensor]:
        """cos and sin by position, (P, D_rot / 2) float32 each; D_rot = 0 where layers rotate in several ways, or none.

        A draft head has one layer, and was trained without rotation there.
        """
        rotary = getattr(getattr(self.module, self.module.base_model_prefix), "rotary_emb", None)
        num_positions = self.config.max_position_embeddings
        if rotary is None or getattr(rotary, "layer_types", None):
            none = torch.empty(num_positions, 0, device=self.device)
            return none, none
        return rotary_tables(rotary, num_positions, self.device)

    @torch.inference_mode()
    def last_norm(self) -> tuple[Tensor, float] | None:
        """See `Model.last_norm`."""
        norm = getattr(getattr(self.module, self.module.base_model_prefix), "norm", None)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if (
            norm is None
            or eps is None
            or getattr(norm, "bias", None) is not None
            or isinstance(norm, torch.nn.LayerNorm)
        ):
            return None
        # The RMS of ones is 1: what comes out is the factor, however the class keeps it (Gemma's is 1 + weight).
        ones = torch.ones(1, self.config.hidden_size, device=self.device, dtype=self.module.dtype)
        return norm(ones)[0].float() * (1 + eps) ** 0.5, float(eps)

    def _call(self, module: Any, tokens: Tensor, positions: Tensor, flat: FlatPass, rows: Tensor | None) -> Tensor:
        no_logits = rows is not None and rows.numel() == 0
        # Transformers reads an index tensor as the rows to keep, and 0 as all of them.
        keep: Any = 0 if rows is None else (rows.new_zeros(1) if no_logits else rows)
        output = module(
            input_ids=tokens.long()[None],
            position_ids=positions.long()[None],
            use_cache=False,
            logits_to_keep=keep,
            **{NAME: flat},
        )
        logits: Tensor = output.logits[0].float()
        return logits[:0] if no_logits else logits

    @torch.inference_mode()
    def _record_calls(self) -> list[LayerCall]:
        blank = torch.zeros(2, dtype=torch.int64, device=self.device)
        flat = FlatPass(blank, blank_index(2, self.device), None, self.kernels)
        try:
            self._call(self.module, blank, blank, flat, None)
        except TypeError as error:
            raise ModelError(
                f"{type(self.module).__name__} cannot be served: it does not take the keywords of a flat pass ({error})"
            ) from error
        missing = [layer for layer in range(len(self.layers)) if layer not in flat.calls]
        if missing or len(flat.calls) != len(self.layers):
            raise ModelError(
                f"{type(self.module).__name__} cannot be served: layers {missing[:8]} do not call the attention "
                "function (they keep a state that cannot be rewound, or an attention of their own)"
            )
        calls = [flat.calls[layer] for layer in range(len(self.layers))]
        _check_layer_types(type(self.module).__name__, self.config, calls)
        return calls

    def _view(self, num_layers: int) -> Any:
        """The module cut to its first layers: weights are shared, the module and its config stay as they are."""
        if num_layers not in self._views:
            if not 1 <= num_layers <= len(self.layers):
                raise ModelError(f"a view of {num_layers} layers was asked of a model that has {len(self.layers)}")
            self._views[num_layers] = _cut(self.module, self.layers_path.split("."), num_layers)
        return self._views[num_layers]


def find_layers(module: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """The decoder's list of layers and its dotted name: the shortest-named ModuleList of that length.

    Raises:
        ModelError: if there is none.
    """
    found = [(name, m) for name, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not found:
        raise ModelError(f"{type(module).__name__} cannot be served: it has no list of {num_layers} decoder layers")
    return min(found, key=lambda item: item[0].count("."))


def _check_layer_types(name: str, config: Any, calls: list[LayerCall]) -> None:
    """Refuse layers whose visible keys a mask alone would tell: a custom attention function gets no mask."""
    for layer, (kind, call) in enumerate(zip(getattr(config, "layer_types", None) or [], calls, strict=False)):
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"{name} cannot be served: layer {layer} is of the kind {kind!r}")
        if (kind == "sliding_attention") != (call.window is not None):
            raise ModelError(f"{name} cannot be served: layer {layer} ({kind}) passes window {call.window}")


def _cut(module: nn.Module, path: list[str], num_layers: int) -> nn.Module:
    view = copy.copy(module)
    view._modules = dict(module._modules)
    child = module._modules[path[0]]
    assert child is not None
    if len(path) == 1:
        assert isinstance(child, nn.ModuleList)
        view._modules[path[0]] = child[:num_layers]
    else:
        view._modules[path[0]] = _cut(child, path[1:], num_layers)
    return view


@contextmanager
def _tapped(layers: nn.ModuleList, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Collect (T, H) float32 outputs of the layers asked for while the block runs."""
    tapped: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tapped[layer] = (output[0] if isinstance(output, tuple) else output)[0].float()

        return hook

    hooks = [layers[layer].register_forward_hook(keep(layer)) for layer in taps]
    try:
        yield tapped
    finally:
        for hook in hooks:
            hook.remove()
