"""Medusa's heads exported as vLLM reads them: heads of the paper's own form, which start from the last state alone."""

from __future__ import annotations

from torch import Tensor

from outrider.errors import ModelError
from outrider.export.base import Export, Layout
from outrider.registry import THERE


class Medusa(Export):
    def vllm(self) -> Layout:
        self._check()
        blocks = sorted({int(name.split(".")[2]) for name in self.tensors if name.startswith("heads.0.")})
        heads = self.artefact.size("num_heads")
        own = "outputs.0.weight" in self.tensors
        config = {
            "model_type": THERE[self.artefact.drafter][0],
            "architectures": ["MedusaModel"],
            "hidden_size": self.subject.text.hidden_size,
            "vocab_size": self.subject.rows,
            "truncated_vocab_size": self.subject.rows,
            "num_heads": heads,
            "num_hidden_layers": len(blocks),
            "original_lm_head": not own,
            "medusa_fc_bias": "heads.0.0.up.bias" in self.tensors,
            "dtype": "bfloat16",
        }
        tensors = {
            f"blocks.{k}.layers.{b}.{part}": self.stored(f"heads.{k}.{b}.up.{part}")
            for k in range(heads)
            for b in blocks
            for part in ("weight", "bias")
            if f"heads.{k}.{b}.up.{part}" in self.tensors
        }
        return Layout(config, tensors | self._outputs(heads, own))

    def sglang(self) -> Layout:
        raise self._nowhere("SGLang")

    def tensorrt(self) -> Layout:
        raise self._nowhere("TensorRT-LLM's PyTorch engine")

    def _outputs(self, heads: int, own: bool) -> dict[str, Tensor]:
        if own:
            return {f"lm_heads.{k}.weight": self._whole(self.stored(f"outputs.{k}.weight")) for k in range(heads)}
        shared = "head.weight" in self.tensors
        kept = self.artefact.kept_ids()
        rows = self.stored("head.weight") if shared else self.subject.output_rows()[kept].bfloat16()
        return {"lm_heads.0.weight": self._whole(rows)}

    def _whole(self, rows: Tensor) -> Tensor:
        """Output rows of the known ids -> of all: vLLM 0.32 does not load a map of a trimmed vocabulary (`token_map`).

        Those that the heads do not know get the mean, as a mean of logits is below the largest one.
        """
        filled = rows.float().mean(dim=0).to(rows.dtype).repeat(self.subject.rows, 1)
        filled[self.artefact.kept_ids()] = rows
        return filled

    def _check(self) -> None:
        if "in_proj.weight" in self.tensors or any(name.endswith(".down.weight") for name in self.tensors):
            raise self.refusal(
                "its heads read three layers and the last token, and vLLM's Medusa has the last state alone",
                "train heads of the plain form (`--shape plain=1`) or eagle3 instead, or serve it here",
            )

    def _nowhere(self, engine: str) -> ModelError:
        return self.refusal(f"{engine} has no Medusa", "export it for vLLM, or serve it here")
