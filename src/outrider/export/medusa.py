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
        heads, kept = self.artefact.size("num_heads"), self.artefact.kept_ids()
        own = "outputs.0.weight" in self.tensors
        config = {
            "model_type": THERE[self.artefact.drafter][0],
            "architectures": ["MedusaModel"],
            "hidden_size": self.subject.text.hidden_size,
            "vocab_size": self.subject.rows,
            "truncated_vocab_size": self.subject.rows if own else len(kept),
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
        kept = self.artefact.kept_ids()
        if not own:
            shared = "head.weight" in self.tensors
            rows = self.stored("head.weight") if shared else self.subject.output_rows()[kept].bfloat16()
            trimmed = {} if len(kept) == self.subject.rows else {"token_map": kept}
            return {"lm_heads.0.weight": rows, **trimmed}
        if len(kept) < self.subject.vocab_size:
            raise self.refusal("vLLM has no trimmed vocabulary where each head has rows of its own", "serve it here")
        made = {}
        for k in range(heads):
            rows = self.stored(f"outputs.{k}.weight")
            # No id of the padding may be guessed: a mean of logits is below the largest one.
            filled = rows.float().mean(dim=0).to(rows.dtype).repeat(self.subject.rows, 1)
            filled[: len(rows)] = rows
            made[f"lm_heads.{k}.weight"] = filled
        return made

    def _check(self) -> None:
        if "in_proj.weight" in self.tensors or any(name.endswith(".down.weight") for name in self.tensors):
            raise self.refusal(
                "its heads read three layers and the last token, and vLLM's Medusa has the last state alone",
                f"train eagle3 for {self.subject.name}, which can, or serve it here",
            )

    def _nowhere(self, engine: str) -> ModelError:
        return self.refusal(f"{engine} has no Medusa", "export it for vLLM, or serve it here")
