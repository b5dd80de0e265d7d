"""The block drafter exported: DFlash's form of it, in `speculators`' layout and in its authors'."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.export.base import Export, Layout
from outrider.models.heads.foreign_block import LAYER
from outrider.registry import THERE


class Block(Export):
    def vllm(self) -> Layout:
        self._check()
        num_layers = self._num_layers()
        layer = self.layer_config("layers.0.", num_layers, "qwen3")
        layer |= {"layer_types": ["full_attention"] * num_layers, "sliding_window": None, "use_sliding_window": False}
        fields = {
            "architectures": ["DFlashSpeculator"],
            "draft_vocab_size": len(self.artefact.kept_ids()),
            "block_size": self.artefact.size("block_size"),
            "target_hidden_size": None,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in self.artefact.config["taps"]],
            "mask_token_id": self.artefact.config["mask_token_id"],
            "sliding_window_non_causal": True,
            "sample_from_anchor": False,
        }
        config = self.speculators(THERE[self.artefact.drafter][0], layer, fields)
        return Layout(config, self._named() | self._head() | self.vocabulary() | self.embedding())

    def sglang(self) -> Layout:
        return self._authors()

    def tensorrt(self) -> Layout:
        return self._authors()

    def _authors(self) -> Layout:
        self._check()
        if len(self.artefact.kept_ids()) < self.subject.vocab_size or "head.weight" in self.tensors:
            raise self.refusal("its authors' layout has the target's own output rows", "export it for vLLM")
        num_layers = self._num_layers()
        layer = self.layer_config("layers.0.", num_layers, "qwen3")
        own: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "block_size": self.artefact.size("block_size"),
            "num_target_layers": self.subject.text.num_hidden_layers,
            "layer_types": ["full_attention"] * num_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "rope_theta": layer["rope_parameters"]["rope_theta"],
            "dflash_config": {
                "mask_token_id": self.artefact.config["mask_token_id"],
                "target_layer_ids": list(self.artefact.config["taps"]),
            },
        }
        return Layout({**layer, **own}, self._named())

    def _num_layers(self) -> int:
        return len({name.split(".")[1] for name in self.tensors if name.startswith("layers.")})

    def _named(self) -> dict[str, Tensor]:
        made = {
            "fc.weight": self.stored("fc.weight"),
            "hidden_norm.weight": self.stored("ctx_norm.weight"),
            "norm.weight": self.stored("final_norm.weight"),
        }
        for index in range(self._num_layers()):
            for ours, theirs in LAYER.items():
                for part in ("weight", "bias"):
                    if f"layers.{index}.{ours}.{part}" in self.tensors:
                        made[f"layers.{index}.{theirs}.{part}"] = self.stored(f"layers.{index}.{ours}.{part}")
        return made

    def _head(self) -> dict[str, Tensor]:
        if "head.weight" in self.tensors:
            return {"lm_head.weight": self.stored("head.weight")}
        kept = self.artefact.kept_ids()
        return {} if len(kept) == self.subject.rows else {"lm_head.weight": self.subject.output_rows()[kept].bfloat16()}

    def _check(self) -> None:
        if self.artefact.config.get("sees") != "both ways":
            raise self.refusal(
                "its block looks back only, and its correction carries a code along it, for which DFlash and DSpark "
                "have no room",
                "train one of the plain form (`--shape plain=1`) or eagle3 instead, or serve it here",
            )
