"""Builds the widened twin of a loaded model (`models/widen`) on its device, one fused projection at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.errors import ModelError
from outrider.kernels.base import Kernels, Linear
from outrider.models.lean import LeanModel
from outrider.models.lean_spec import fits, rotary_tables, spec_of
from outrider.models.shapes import Shape, target_shape
from outrider.models.target import Original, Target
from outrider.models.widen import Widening


def widening_of(module: Any, name: str) -> Widening:
    """How a Transformers module is widened by the plan of that name, on its device and in its type.

    Raises:
        ModelError: if it is no plain Llama, or larger than the plan.
    """
    spec = spec_of(module.config)
    if spec is None or not fits(spec, module):
        raise ModelError(f"a {module.config.model_type} cannot be widened: choose a Llama-like model")
    return Widening(spec, target_shape(name, Shape.of(spec)), module.device, module.dtype)


@torch.inference_mode()
def twin_model(module: Any, widening: Widening, kernels: Kernels) -> LeanModel:
    """The twin on the lean layers; no more than one fused projection is held besides what they pack.

    Raises:
        ModelError: if the larger heads do not rotate by the smaller ones' angles (a rotary variant that counts them).
    """
    small, tables = (
        rotary_tables(_rotary(module, config), widening.small.max_positions, module.device)
        for config in (module.config, widening.config(module.config))
    )
    if any(not torch.equal(b[:, :: widening.stretch], a) for a, b in zip(small, tables, strict=True)):
        raise ModelError("this model's rotary variant has other angles in larger heads: it cannot be widened")
    scaled = (tables[0] * widening.rotary_scale(), tables[1] * widening.rotary_scale())
    return LeanModel(widening.spec(), _TwinWeights(module, widening, kernels), kernels, scaled)


@torch.inference_mode()
def twin_module(module: Any, widening: Widening) -> Any:
    """The twin as a module of Transformers, for measuring beside it: norms are rounded to the module's own type."""
    config = widening.config(module.config)
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(config, dtype=module.dtype)
    made.to_empty(device=module.device)
    made.model.rotary_emb = _rotary(module, config)
    made.model.rotary_emb.attention_scaling *= widening.rotary_scale()
    state = module.state_dict()
    for name, parameter in made.named_parameters():
        widening.write(state, name, parameter.data)
    made.generation_config = module.generation_config
    return made.eval()


def as_twin(target: Target, original: Original) -> Target:
    """A target with the twin's model, said to be one wherever it is named."""
    note = (
        f"a widened twin: {original.name} enlarged to {target.nbytes / 1e9:.1f} GB by parts that add nothing to what "
        "it says; it costs what a model of that shape costs"
    )
    return replace(
        target,
        name=f"{original.name}, widened to {original.plan}",
        vocab_size=target.config.vocab_size,
        original=original,
        notes=[*target.notes, note],
    )


def _rotary(module: Any, config: Any) -> Any:
    """Fresh, in float32 whatever the module's type is."""
    return type(module.model.rotary_emb)(config).to(module.device)


class _TwinWeights:
    """The twin's tensors as the lean layers ask for them; see `lean_weights.Weights`."""

    def __init__(self, module: Any, widening: Widening, kernels: Kernels) -> None:
        self._state: Mapping[str, Tensor] = module.state_dict()
        self._widening = widening
        self._kernels = kernels
        self._shapes = widening.spec().shapes()

    def linears(self, names: Sequence[str]) -> list[Linear]:
        """Always one."""
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        widening = self._widening
        whole = torch.empty(sum(rows for rows, _ in shapes), shapes[0][1], dtype=widening.dtype, device=widening.device)
        for name, part in zip(names, whole.split([rows for rows, _ in shapes]), strict=True):
            widening.write(self._state, f"{name}.weight", part)
        return [self._kernels.pack(whole)]

    def vector(self, name: str) -> Tensor:
        out = torch.empty(self._shapes[f"{name}.weight"], device=self._widening.device)
        self._widening.write(self._state, f"{name}.weight", out)
        return out
