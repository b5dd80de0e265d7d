"""A stand-alone small Llama over its own trimmed vocabulary, distilled from the target's laws on the target's replies.

Sources: DistillSpec (Zhou et al., 2310.08461); rows shared by rare ids in the input after hash embeddings (1709.03933).
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as project
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.training.base import Counts, DraftModule, before, combine
from outrider.training.corpus import Batch
from outrider.training.harvest import Features
from outrider.training.layers import Shape


class SmallModel(DraftModule):
    """Reads every id of the target, says the kept ones: ids 0 .. V_d - 1 are the kept ids in order, and each other
    target id shares one of `num_buckets` further rows, which are never proposed.

    Args:
        hidden, num_layers, num_heads, num_kv_heads, head_dim, intermediate: of the Llama.
        num_buckets: rows for all other ids. depth: levels of the greedy chain in the counts.
    """

    learning_rate = 2e-3
    bucket_table: Tensor

    def __init__(
        self,
        shape: Shape,
        kept_ids: Tensor,
        hidden: int = 192,
        num_layers: int = 6,
        num_heads: int = 3,
        num_kv_heads: int = 1,
        head_dim: int = 64,
        intermediate: int = 768,
        num_buckets: int = 256,
        depth: int = 5,
    ) -> None:
        super().__init__(shape, kept_ids)
        self.num_levels = depth
        self.num_buckets = num_buckets
        self.llama_config = LlamaConfig(
            vocab_size=len(kept_ids) + num_buckets,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=shape.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        self.model = LlamaForCausalLM(self.llama_config).model
        table = len(kept_ids) + torch.arange(shape.vocab_size) % num_buckets
        table[kept_ids.long().cpu()] = torch.arange(len(kept_ids))
        self.register_buffer("bucket_table", table, persistent=False)

    @classmethod
    def initialise(cls, module: Any, kept_ids: Tensor, **settings: Any) -> Self:
        """From scratch: it takes nothing of the target but its vocabulary."""
        return cls(Shape.of(module), kept_ids, **settings).to(module.device)

    def settings(self) -> dict[str, Any]:
        return {
            "vocabulary": len(self.kept_ids),
            "num_buckets": self.num_buckets,
            "llama": self.llama_config.to_diff_dict(),
        }

    def loss(self, batch: Batch, features: Features) -> tuple[Tensor, Counts]:
        states = self.model(input_ids=self.bucket_table[batch.tokens], use_cache=False).last_hidden_state
        head = self.model.embed_tokens.weight[: len(self.kept_ids)]
        rows = before(states, batch.rows, 0)
        score = features.arithmetic.score(lambda state: project(state, head), (rows,), features.law)
        return combine([score] * self.num_levels, batch.offsets, [1.0] + [0.0] * (self.num_levels - 1))

    def fusible(self) -> list[tuple[nn.Module, str]]:
        return [(layer, "forward") for layer in self.model.layers]
