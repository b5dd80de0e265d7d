"""A stand-alone small Llama over a trimmed vocabulary: its rows are the kept ids, and buckets that all others share.

Sources: DistillSpec (Zhou et al., 2310.08461) for a draft distilled from its target; shared input rows as hash
embeddings (Svenstrup et al., 1709.03933).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.cache.pages import Pages, PageSpec
from outrider.errors import ModelError
from outrider.kernels.base import Linear
from outrider.models.batch import FlatBatch
from outrider.models.checks import first_line
from outrider.models.heads.files import Artefact, check_target
from outrider.models.heads.layer import Parts
from outrider.models.lean import LeanModel
from outrider.models.lean_spec import LeanSpec, rotary_tables, spec_of
from outrider.models.target import Target


class TrimmedModel:
    """Reads every id of the target and speaks the kept ones.

    Attributes:
        stack: its layers' pages. page_dtype: of keys and values. kept_ids: (V_d,) int64. nbytes: of its weights.

    Raises:
        ModelError: if the artefact was trained for another target or is not whole.
    """

    def __init__(self, artefact: Artefact, target: Target, kind: str | None = None) -> None:
        """kind: of the packed weights; see `stage.pack`."""
        check_target(artefact, target)
        config = llama_config(artefact)
        config.max_position_embeddings = max(config.max_position_embeddings, target.max_positions)
        spec = spec_of(config)
        if spec is None or not spec.tied:
            raise ModelError(
                f"the {artefact.drafter} drafter is no tied Llama of the kind that is served: train it again"
            )
        self.kept_ids = artefact.kept_ids().to(target.device)
        self.device = target.device
        self.page_dtype = target.page_dtype
        rotary = LlamaRotaryEmbedding(config).to(target.device)
        with torch.inference_mode():
            weights = _Weights(Parts(artefact, target, kind), spec)
            tables = rotary_tables(rotary, spec.max_positions, target.device)
            self._model = LeanModel(spec, weights, target.kernels, tables)
        self.stack: tuple[PageSpec, ...] = tuple(self._model.page_specs)
        self.nbytes = self._model.nbytes
        ids = torch.arange(target.vocab_size, device=target.device)
        self._rows = self.kept_ids.shape[0] + ids % artefact.size("num_buckets")
        self._rows[self.kept_ids] = torch.arange(self.kept_ids.shape[0], device=target.device)

    def logits(self, batch: FlatBatch, pages: Pages) -> Tensor:
        """One pass over target tokens -> logits (M, V_d) float32 over the kept ids."""
        tokens = self._rows.index_select(0, batch.tokens)
        logits, _ = self._model.forward(tokens, batch.positions, batch.slots, batch.keys, pages, batch.logit_rows)
        return logits[:, : self.kept_ids.shape[0]]


def llama_config(artefact: Artefact) -> LlamaConfig:
    """What the small model's layers are.

    Raises:
        ModelError: if the artefact does not tell.
    """
    try:
        return LlamaConfig(**artefact.config["llama"])
    except (LookupError, TypeError, ValueError, StrictDataclassError) as error:
        raise ModelError(
            f"the {artefact.drafter} drafter's config has no sizes of a Llama that can be read "
            f"({first_line(error)}): fetch or train it again"
        ) from error


class _Weights:
    """The artefact's tensors as the lean layers ask for them; see `lean_weights.Weights`."""

    def __init__(self, parts: Parts, spec: LeanSpec) -> None:
        self._parts = parts
        self._shapes = spec.shapes()

    def linears(self, names: Sequence[str]) -> list[Linear]:
        """Always one."""
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        for name, shape in zip(names, shapes, strict=True):
            self._parts.tensor(f"{name}.weight", *shape)
        return [self._parts.linear(list(names), None, shapes[0][1])]

    def vector(self, name: str) -> Tensor:
        return self._parts.floats(f"{name}.weight", *self._shapes[f"{name}.weight"])
