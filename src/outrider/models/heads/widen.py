"""A trained drafter opened for its target; for a widened twin it is widened by the twin's rule to its natural share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.heads import files, foreign
from outrider.models.heads.files import Artefact, check_target, describe_target
from outrider.models.heads.small import llama_config
from outrider.models.lean_spec import LeanSpec, spec_of
from outrider.models.shapes import Shape, draft_shape, draft_words, target_shape
from outrider.models.target import Original, Target
from outrider.models.widen import Widening

_OWN_WORDS = "head.weight"
"""Output rows of a head's own; others use the target's."""


def open_artefact(drafter: str, named: str | None, target: Target) -> Artefact:
    """The trained drafter that an engine's settings ask for (`files.wanted`), fit for the target.

    Raises:
        ModelError: if there is none, it is damaged, is for another target, or cannot be widened.
    """
    folder = files.wanted(drafter, named, target)
    if foreign.is_foreign(folder):
        return foreign.load(folder, drafter, target)
    artefact = files.read(folder, drafter)
    return artefact if target.original is None else widened(artefact, target)


@torch.inference_mode()
def widened(artefact: Artefact, target: Target) -> Artefact:
    """The drafter of a twin's original -> the twin's, in bfloat16 on its device; norms stay float32.

    Raises:
        ModelError: if it was trained for another target than the original, or has parts that cannot be widened.
    """
    assert target.original is not None
    if artefact.config.get("plain") or "sees" in artefact.config:
        raise ModelError(f"a {artefact.drafter} drafter of the plain form is not widened: leave widen out")
    check_target(artefact, target.original)
    make = _small_model if "llama" in artefact.config else _head
    fields, tensors = make(artefact, target, target.original)
    return Artefact({**artefact.config, **fields, "target": describe_target(target)}, tensors)


def _head(artefact: Artefact, target: Target, original: Original) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head over the target's states: as many channels, heads and units as the target, and more words of its own."""
    spec = spec_of(original.config)
    assert spec is not None  # what cannot be described has no twin
    small, shape = _sizes(artefact, spec), target_shape(original.plan, Shape.of(spec))
    widening = Widening(small, shape, target.device, torch.bfloat16)
    tensors = {name: widening.tensor(name, part) for name, part in artefact.tensors.items() if name != _OWN_WORDS}
    if _OWN_WORDS in artefact.tensors:
        # The constant is in the target's embedding and taps, not in the states of a head.
        free = Widening(small, shape, target.device, torch.bfloat16, barred=False)
        count = artefact.kept_ids().shape[0]
        extra = min(draft_words(original.plan, count) - count, target.vocab_size - original.vocab_size)
        tensors[_OWN_WORDS] = free.tensor(_OWN_WORDS, artefact.tensors[_OWN_WORDS], count + extra)
        added = torch.arange(target.vocab_size - extra, target.vocab_size, device=target.device)
        tensors["kept_ids"] = torch.cat((tensors["kept_ids"], added.to(tensors["kept_ids"].dtype)))
    return {}, tensors


def _sizes(artefact: Artefact, spec: LeanSpec) -> LeanSpec:
    """The head's own layers, where it has any, beside the target's channels; several layers are of one size."""

    def rows(name: str, default: int) -> int:
        found = [part.shape[0] for key, part in artefact.tensors.items() if key.endswith(f"{name}.weight")]
        return found[0] if found else default

    dim = spec.head_dim
    return replace(
        spec,
        num_heads=rows("q_proj", spec.num_heads * dim) // dim,
        num_kv_heads=rows("k_proj", spec.num_kv_heads * dim) // dim,
        intermediate=rows("gate_proj", spec.intermediate),
    )


def _small_model(artefact: Artefact, target: Target, original: Original) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A stand-alone model of a shape of its own; rows that nobody looks up follow those of its words and buckets."""
    llama = llama_config(artefact)
    spec = spec_of(llama)
    if spec is None:
        raise ModelError(f"the {artefact.drafter} drafter is no Llama of the kind that is widened: train it again")
    shape = draft_shape(original.plan, Shape.of(spec))
    widening = Widening(spec, shape, target.device, torch.bfloat16, barred=False)
    tensors = {"kept_ids": artefact.tensors["kept_ids"]}
    for name, sizes in widening.spec().shapes().items():
        if name in artefact.tensors or ".layers." in name:
            dtype = torch.bfloat16 if len(sizes) == 2 else torch.float32
            tensors[name] = torch.empty(sizes, dtype=dtype, device=target.device)
            widening.write(artefact.tensors, name, tensors[name])
    return {"llama": {**widening.config(llama).to_dict(), "tie_word_embeddings": True}}, tensors
