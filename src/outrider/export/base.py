"""What is exported: a drafter beside its target, and a layout of another engine: a config, and tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.errors import ModelError
from outrider.models.heads.files import Artefact
from outrider.models.heads.layer import EPS
from outrider.models.heads.layouts import rotation
from outrider.models.lean_spec import rotary_tables

VERSION = "0.9.0"
"""Of `speculators`, whose layout is written."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A folder to be: its config.json and its tensors by the names of that layout."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """The target, as far as an export needs to know it.

    Attributes:
        name: what it is called here. there: what the other engine shall call it.
        config: Transformers' own. vocab_size: ids that may be emitted; its tables may have more rows.
        output_rows: gives the rows of its output head, (V, H), reading its weights.
    """

    name: str
    there: str
    config: Any
    vocab_size: int
    output_rows: Callable[[], Tensor]

    @property
    def text(self) -> Any:
        return self.config.get_text_config(decoder=True)

    @property
    def rows(self) -> int:
        """Rows of its tables, padding included."""
        return int(self.text.vocab_size)


class Export:
    """A drafter of one kind; says it in each layout that has room for all that it does.

    Every way raises a ModelError that names what there is no room for, and what to do instead.
    """

    def __init__(self, artefact: Artefact, subject: Subject, guesses: int) -> None:
        """guesses: tokens a cycle that the other engine shall ask for."""
        self.artefact = artefact
        self.tensors = artefact.tensors
        self.subject = subject
        self.guesses = guesses

    def vllm(self) -> Layout:
        """As vLLM reads it: the layout of `speculators` where it knows the kind."""
        raise NotImplementedError

    def sglang(self) -> Layout:
        raise NotImplementedError

    def tensorrt(self) -> Layout:
        raise NotImplementedError

    def refusal(self, what: str, remedy: str) -> ModelError:
        return ModelError(f"the {self.artefact.drafter} drafter cannot be exported so: {what}; {remedy}")

    def stored(self, name: str) -> Tensor:
        """A tensor as it is written, floating ones in bfloat16 where they are not half precision already."""
        found = self.tensors[name]
        return found if found.dtype in (torch.bfloat16, torch.float16) else found.bfloat16()

    def eps(self) -> float:
        own: float | None = self.artefact.config.get("eps")
        return own if own is not None else float(getattr(self.subject.text, "rms_norm_eps", EPS))

    def rope(self) -> dict[str, Any]:
        """How positions are rotated: as the artefact says, or as its target does.

        Raises:
            ModelError: where the target's rotation is none that a draft head has elsewhere.
        """
        own = self.artefact.config.get("rope")
        if own is not None:
            return dict(own)
        try:
            found = rotation(self.subject.text.to_dict(), 10_000.0)
        except ModelError as error:
            raise self.refusal(f"of its target {error}", "serve it here") from error
        told = self.artefact.config["target"].get("rotary")
        if told is not None and not _same_angles(found, self.head_dim(), told):
            raise self.refusal("its target rotates positions by angles that its config does not tell", "serve it here")
        return found

    def head_dim(self) -> int:
        text = self.subject.text
        own = self.artefact.config.get("head_dim") or getattr(text, "head_dim", None)
        return int(own or text.hidden_size // text.num_attention_heads)

    def speculators(self, algorithm: str, layer: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json in the layout of `speculators`."""
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": self.guesses,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "speculators_model_type": algorithm,
            "speculators_version": VERSION,
            "speculators_config": {
                "algorithm": algorithm,
                "proposal_methods": [proposal],
                "default_proposal_method": "greedy",
                "verifier": {
                    "name_or_path": self.subject.there,
                    "architectures": list(self.subject.config.architectures or []),
                },
            },
            "transformer_layer_config": dict(layer),
            "dtype": "bfloat16",
            **fields,
        }

    def layer_config(self, prefix: str, num_layers: int, model_type: str) -> dict[str, Any]:
        """Sizes of decoder layers, whose parts are named `prefix` and ours."""
        dim, inner = self.head_dim(), self.tensors[f"{prefix}gate_proj.weight"].shape[0]
        return {
            "model_type": model_type,
            "vocab_size": self.subject.rows,
            "hidden_size": self.subject.text.hidden_size,
            "intermediate_size": inner,
            "num_hidden_layers": num_layers,
            "num_attention_heads": self.tensors[f"{prefix}q_proj.weight"].shape[0] // dim,
            "num_key_value_heads": self.tensors[f"{prefix}k_proj.weight"].shape[0] // dim,
            "head_dim": dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps(),
            "rope_parameters": self.rope(),
            "max_position_embeddings": self.subject.text.max_position_embeddings,
            "attention_bias": f"{prefix}q_proj.bias" in self.tensors,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }

    def vocabulary(self) -> dict[str, Tensor]:
        """`d2t`, how far an output row's id is from its number, and `t2d`, which ids have one; nothing if all have."""
        kept = self.artefact.kept_ids()
        if len(kept) == self.subject.rows:
            return {}
        known = torch.zeros(self.subject.rows, dtype=torch.bool)
        known[kept] = True
        return {"d2t": kept - torch.arange(len(kept)), "t2d": known}

    def embedding(self) -> dict[str, Tensor]:
        """Input rows of its own, where it has any: padded as the target's table is."""
        if "embed.weight" not in self.tensors:
            return {}
        rows = self.stored("embed.weight")
        blank = rows.new_zeros(self.subject.rows - len(rows), rows.shape[1])
        return {"embed_tokens.weight": torch.cat([rows, blank])}


def _same_angles(rope: Mapping[str, Any], dim: int, told: str) -> bool:
    sizes: Any = {"hidden_size": dim, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": dim}
    cos, sin = rotary_tables(
        LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope))), 2, torch.device("cpu")
    )
    angles = torch.tensor([float(word) for word in told.split()])
    return angles.shape == cos[1].shape and torch.allclose(torch.atan2(sin[1], cos[1]), angles, rtol=1e-3, atol=1e-6)
