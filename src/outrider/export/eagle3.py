"""EAGLE-3's head exported: the layer's names in `speculators`' layout and in its authors', norms of the taps included.

Sources: vLLM 0.32 (llama_eagle3.py: `fc_norm`, `norm_output`), speculators 0.9, TensorRT-LLM (modeling_speculative.py),
SGLang (llama_eagle3.py, which has neither norm).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.export.base import Export, Layout
from outrider.models.heads.foreign_eagle3 import LAYER
from outrider.registry import THERE


class Eagle3(Export):
    """One layer; entry 0 is seen by nobody here either, and positions one later at every place change no guess."""

    def vllm(self) -> Layout:
        taps = self._inputs()
        own = "embed.weight" in self.tensors
        fields = {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": len(self.artefact.kept_ids()),
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": taps,
            "norm_before_residual": self._residual_normed(),
            "norm_before_fc": "joint_norm.weight" in self.tensors,
            "fc_norm": "tap_norms" in self.tensors,
            "norm_output": self._fed_back_normed(),
            "embed_requires_grad": own,
        }
        layer = self._layer()
        if len(taps) != 3:
            layer["num_aux_hidden_states"] = len(taps)  # vLLM takes three where nothing is said
        config = self.speculators(THERE[self.artefact.drafter][0], layer, fields)
        return Layout(config, self._named("layers.0") | self.vocabulary() | self.embedding())

    def sglang(self) -> Layout:
        if "tap_norms" in self.tensors or "joint_norm.weight" in self.tensors or self._fed_back_normed():
            raise self.refusal(
                "SGLang's layer neither norms what it reads of the target nor what it feeds back", "serve it with vLLM"
            )
        return self._authors()

    def tensorrt(self) -> Layout:
        if self._residual_normed():
            raise self.refusal("TensorRT-LLM's layer adds to the feature as it is, not normed", "serve it with vLLM")
        return self._authors()

    def _authors(self) -> Layout:
        """Flat, as the authors write it; what their layer has not is a field more."""
        if any(name in self.tensors for name in ("q_norm.weight", "q_proj.bias")):
            raise self.refusal("its authors' layer has no norms of queries and no biases", "serve it with vLLM")
        fields: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.artefact.kept_ids()),
            "fc_norm": "tap_norms" in self.tensors,
            "norm_output": self._fed_back_normed(),
            "eagle_aux_hidden_state_layer_ids": self._inputs(),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.artefact.config["taps"]),
                "norm_before_fc": "joint_norm.weight" in self.tensors,
                "use_aux_hidden_state": True,
            },
        }
        layer = self._layer()
        layer["rope_theta"] = layer["rope_parameters"]["rope_theta"]  # readers of before rope_parameters
        if layer["rope_parameters"]["rope_type"] != "default":
            layer["rope_scaling"] = {k: v for k, v in layer["rope_parameters"].items() if k != "rope_theta"}
        return Layout({**layer, **fields}, self._named("midlayer") | self.vocabulary() | self.embedding())

    def _inputs(self) -> list[int]:
        """Layers whose inputs are tapped, as every engine counts but here and within `eagle_config`."""
        taps = [int(layer) + 1 for layer in self.artefact.config["taps"]]
        if sorted(set(taps)) != taps:
            raise self.refusal("other engines read a tapped layer once, and in order", "serve it here")
        return taps

    def _layer(self) -> dict[str, Any]:
        return self.layer_config("", 1, "qwen3" if "q_norm.weight" in self.tensors else "llama")

    def _fed_back_normed(self) -> bool:
        return bool(self.artefact.config.get("fed_back", "normed") == "normed")

    def _residual_normed(self) -> bool:
        return bool(self.artefact.config.get("residual", "feature") == "normed")

    def _named(self, prefix: str) -> dict[str, Tensor]:
        made = {"fc.weight": self.stored("fc.weight"), "norm.weight": self.stored("final_norm.weight")}
        for ours, theirs in LAYER.items():
            for part in ("weight", "bias"):
                if f"{ours}.{part}" in self.tensors:
                    made[f"{prefix}.{theirs}.{part}"] = self.stored(f"{ours}.{part}")
        if "tap_norms" in self.tensors:
            made |= {f"fc_norm.{index}.weight": norm for index, norm in enumerate(self.stored("tap_norms"))}
        if "joint_norm.weight" in self.tensors:
            made["input_norm.weight"] = self.stored("joint_norm.weight")
        if "head.weight" in self.tensors:
            made["lm_head.weight"] = self.stored("head.weight")
        else:
            made["lm_head.weight"] = self.subject.output_rows()[self.artefact.kept_ids()].bfloat16()
        return made
