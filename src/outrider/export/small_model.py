"""A small model exported: a plain Llama over the target's whole vocabulary, which every engine drafts with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.export.base import Export, Layout
from outrider.models.heads.small import llama_config

_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SmallModel(Export):
    """The trimmed vocabulary is unrolled: ids that share an input row each get a copy of it.

    An output row must stand for every id, and none that the model does not know may be guessed. Those get the mean of
    the known ids' rows: a mean of logits is below the largest one, whatever the state is.
    """

    def vllm(self) -> Layout:
        return self._llama()

    def sglang(self) -> Layout:
        return self._llama()

    def tensorrt(self) -> Layout:
        return self._llama()

    def _llama(self) -> Layout:
        config: dict[str, Any] = llama_config(self.artefact).to_dict()
        config |= {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.subject.rows,
            "tie_word_embeddings": False,
            "max_position_embeddings": max(
                config["max_position_embeddings"], self.subject.text.max_position_embeddings
            ),
            "dtype": "bfloat16",
        }
        tensors = {name: self.stored(name) for name in self.tensors if name not in (_TABLE, "kept_ids")}
        tensors[_TABLE], tensors[_HEAD] = self._rows()
        return Layout(config, tensors)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Input and output rows of every id, (V, h) each."""
        table, kept = self.stored(_TABLE), self.artefact.kept_ids()
        ids = torch.arange(self.subject.rows)
        places = len(kept) + ids % self.artefact.size("num_buckets")
        places[kept] = torch.arange(len(kept))
        known = table[: len(kept)]
        output = known.float().mean(dim=0).to(table.dtype).repeat(self.subject.rows, 1)
        output[kept] = known
        return table[places], output
