"""Heads of others: random ones in their layouts, and their published forward passes, dense and in float64.

The forwards are written from their code, none of ours: SafeAILab/EAGLE `eagle/model/cnets.py` with the norms and flags
that vLLM 0.32's `llama_eagle3.py` and speculators 0.9's `models/eagle3` add, FasterDecoding/Medusa's
`medusa_model.py`, and z-lab/dflash's `model.py`. Each takes the config.json, the tensors by their names there, the
target's embedding and head (V, H), the known tokens, what the target gives for them, and tokens guessed beyond; it
gives logits (V,) of what follows, -inf for ids that the head does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

Config = Mapping[str, Any]


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    return config, {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def write(folder: Path, config: Config, tensors: Mapping[str, Tensor]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if "medusa_num_heads" in config:
        torch.save(dict(tensors), folder / "medusa_lm_head.pt")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight.double() * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, position: int, config: Config) -> Tensor:
    """x: (heads, D) -> rotated as Llama does, by `rotate_half`; linear scaling divides the position."""
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    dim = x.shape[-1]
    inverse = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = position / rope.get("factor", 1.0) * torch.cat([inverse, inverse])
    half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
    return x * angles.cos() + half * angles.sin()


def attention(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """q: (heads, D); keys and values: (kv heads, D) each -> (heads * D,)."""
    k, v = torch.stack(list(keys)), torch.stack(list(values))
    groups = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    weights = (torch.einsum("hd,khd->hk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, v).flatten()


def mlp(x: Tensor, w: Mapping[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (w[f"{prefix}.mlp.{part}_proj.weight"].double() for part in ("gate", "up", "down"))
    return down @ (silu(gate @ x) * (up @ x))


class Projector:
    """q, k and v of one layer, with biases and norms of heads where there are any."""

    def __init__(self, w: Mapping[str, Tensor], prefix: str, config: Config) -> None:
        self.w, self.prefix, self.config = w, f"{prefix}.self_attn", config
        self.dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def __call__(self, part: str, x: Tensor, position: int | None) -> Tensor:
        made = self.w[f"{self.prefix}.{part}_proj.weight"].double() @ x
        bias = self.w.get(f"{self.prefix}.{part}_proj.bias")
        made = (made if bias is None else made + bias.double()).view(-1, self.dim)
        scale = self.w.get(f"{self.prefix}.{part}_norm.weight")
        if scale is not None:
            made = norm(made, scale, self.config["rms_norm_eps"])
        return made if position is None else rotate(made, position, self.config)

    def out(self, mixed: Tensor) -> Tensor:
        made = self.w[f"{self.prefix}.o_proj.weight"].double() @ mixed
        bias = self.w.get(f"{self.prefix}.o_proj.bias")
        return made if bias is None else made + bias.double()


def scattered(logits: Tensor, w: Mapping[str, Tensor], words: int) -> Tensor:
    """Logits of a draft vocabulary to those of the target's, by d2t."""
    if "d2t" not in w:
        return logits[:words]
    out = torch.full((words,), -torch.inf, dtype=torch.float64)
    out[torch.arange(len(w["d2t"])) + w["d2t"]] = logits
    return out


def eagle3(
    config: Config,
    w: Mapping[str, Tensor],
    embedding: Tensor,
    known: Sequence[int],
    states: Sequence[Tensor],
    path: Sequence[int] = (),
    blind: range = range(0),
) -> Tensor:
    """states: output of every layer of the target at every known position, (T, H) each.

    Inputs are token x_{j + 1} beside what the target gave at j, at position j: there is none for the first token.
    blind: tokens whose entry has zeros for that, as a prefix is read whose states nobody saw.
    """
    layer = config.get("transformer_layer_config", config)
    eps, prefix = layer["rms_norm_eps"], "layers.0" if "layers.0.hidden_norm.weight" in w else "midlayer"
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    ids = ids or [2, len(states) // 2, len(states) - 3]
    project = Projector(w, prefix, layer)
    embedding = w.get("embed_tokens.weight", embedding)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits = hidden = torch.empty(0)
    tokens = [*known, *path]
    for j in range(len(tokens) - 1):
        if j < len(known) - 1:  # `layer id` names the layer before which the states are taken
            parts = [states[i - 1][j].double() * (j + 1 not in blind) for i in ids]
            if config.get("fc_norm"):
                parts = [norm(part, w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)]
            joined = torch.cat(parts)
            if (config.get("eagle_config") or config).get("norm_before_fc"):
                joined = norm(joined, w["input_norm.weight"], eps)
            hidden = w["fc.weight"].double() @ joined
        residual = hidden
        normed = norm(hidden, w[f"{prefix}.hidden_norm.weight"], eps)
        if config.get("norm_before_residual"):
            residual = normed
        x = torch.cat([norm(embedding[tokens[j + 1]].double(), w[f"{prefix}.input_layernorm.weight"], eps), normed])
        keys.append(project("k", x, j))
        values.append(project("v", x, None))
        x = residual + project.out(attention(project("q", x, j), keys, values))
        x = x + mlp(norm(x, w[f"{prefix}.post_attention_layernorm.weight"], eps), w, prefix)
        normed = norm(x, w["norm.weight"], eps)
        hidden = normed if config.get("norm_output") else x
        logits = w["lm_head.weight"].double() @ normed
    return scattered(logits, w, len(embedding))


def medusa(config: Config, w: Mapping[str, Tensor], head: Tensor, last: Tensor, level: int) -> Tensor:
    """last: (H,), the target's normed state two positions before what head 0 guesses."""
    x = last.double()
    if "blocks.0.layers.0.weight" in w:  # vLLM's names
        count, block, out = config["num_hidden_layers"], "blocks.{}.layers.{}", f"lm_heads.{level}.weight"
    else:
        count, block, out = config["medusa_num_layers"], "{}.{}.linear", f"{level}.{config['medusa_num_layers']}.weight"
    for b in range(count):
        name = block.format(level, b)
        bias = w.get(f"{name}.bias", torch.zeros(1))
        x = x + silu(w[f"{name}.weight"].double() @ x + bias.double())
    rows = w["lm_heads.0.weight"] if config.get("original_lm_head") else w.get(out, head)
    logits = rows.double() @ x
    if "token_map" in w:
        whole = torch.full((len(head),), -torch.inf, dtype=torch.float64)
        whole[w["token_map"]] = logits
        return whole
    return logits[: len(head)]


def dflash(
    config: Config,
    w: Mapping[str, Tensor],
    embedding: Tensor,
    head: Tensor,
    known: Sequence[int],
    states: Sequence[Tensor],
    level: int,
    blind: range = range(0),
) -> Tensor:
    """Row `level + 1` of the block whose first row is the last known token, at that token's position."""
    layer, own = config.get("transformer_layer_config", config), config.get("dflash_config", {})
    eps = layer["rms_norm_eps"]
    ids = config.get("aux_hidden_state_layer_ids") or [i + 1 for i in own["target_layer_ids"]]
    size, mask = config["block_size"], config.get("mask_token_id", own.get("mask_token_id"))
    embedding = w.get("embed_tokens.weight", embedding)
    context = []
    for j in range(len(known) - 1):
        joined = torch.cat([states[i - 1][j].double() * (j + 1 not in blind) for i in ids])
        context.append(norm(w["fc.weight"].double() @ joined, w["hidden_norm.weight"], eps))
    start = len(known) - 1
    rows = [embedding[token].double() for token in [known[-1], *[mask] * (size - 1)]]
    for index in range(layer["num_hidden_layers"]):
        prefix = f"layers.{index}"
        project = Projector(w, prefix, layer)
        normed = [norm(row, w[f"{prefix}.input_layernorm.weight"], eps) for row in rows]
        places = [*enumerate(context), *((start + i, row) for i, row in enumerate(normed))]
        keys = [project("k", x, position) for position, x in places]
        values = [project("v", x, None) for _, x in places]
        mixed = [project.out(attention(project("q", row, start + i), keys, values)) for i, row in enumerate(normed)]
        rows = [row + m for row, m in zip(rows, mixed, strict=True)]
        post = w[f"{prefix}.post_attention_layernorm.weight"]
        rows = [row + mlp(norm(row, post, eps), w, prefix) for row in rows]
    rows_out = w.get("lm_head.weight", head)
    return scattered(rows_out.double() @ norm(rows[level + 1], w["norm.weight"], eps), w, len(embedding))


class Maker:
    """Random tensors in bfloat16, beside a target's config."""

    def __init__(self, target_config: Any, seed: int = 0) -> None:
        self.target = target_config
        self.hidden: int = target_config.hidden_size
        self.words: int = target_config.vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def weight(self, *shape: int, gain: float = 1.5) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * gain * shape[-1] ** -0.5).bfloat16()

    def scale(self, *shape: int) -> Tensor:
        return (1 + 0.2 * torch.randn(*shape, generator=self.generator)).bfloat16()

    def sizes(self, **more: Any) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden,
            "vocab_size": self.words,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            **more,
        }

    def layer(self, prefix: str, inputs: int, dim: int, qwen: bool, bias: bool = False) -> dict[str, Tensor]:
        shapes = {
            "self_attn.q_proj": (4 * dim, inputs),
            "self_attn.k_proj": (2 * dim, inputs),
            "self_attn.v_proj": (2 * dim, inputs),
            "self_attn.o_proj": (self.hidden, 4 * dim),
            "mlp.gate_proj": (48, self.hidden),
            "mlp.up_proj": (48, self.hidden),
            "mlp.down_proj": (self.hidden, 48),
        }
        made = {f"{prefix}.{name}.weight": self.weight(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}.{name}.weight"] = self.scale(self.hidden)
        if qwen:
            made |= {f"{prefix}.self_attn.{part}_norm.weight": self.scale(dim) for part in "qk"}
        if bias:
            sizes = {"q": 4 * dim, "k": 2 * dim, "v": 2 * dim, "o": self.hidden}
            made |= {f"{prefix}.self_attn.{part}_proj.bias": self.weight(size) for part, size in sizes.items()}
        return made

    def trimmed(self, count: int) -> dict[str, Tensor]:
        """d2t and t2d of `count` ids."""
        kept = torch.randperm(self.words, generator=self.generator)[:count].sort().values
        known = torch.zeros(self.words, dtype=torch.bool)
        known[kept] = True
        return {"d2t": kept - torch.arange(count), "t2d": known}

    def eagle3(self, prefix: str, num_taps: int, qwen: bool, bias: bool, dim: int) -> dict[str, Tensor]:
        kept = self.words - 3
        return {
            **self.layer(prefix, 2 * self.hidden, dim, qwen, bias),
            f"{prefix}.hidden_norm.weight": self.scale(self.hidden),
            "fc.weight": self.weight(self.hidden, num_taps * self.hidden),
            "norm.weight": self.scale(self.hidden),
            "lm_head.weight": self.weight(kept, self.hidden, gain=3),
            **self.trimmed(kept),
        }


def _authors_eagle3(m: Maker) -> tuple[Config, dict[str, Tensor]]:
    """As SafeAILab/EAGLE writes it: no layer ids, no theta."""
    return m.sizes(draft_vocab_size=m.words - 3, num_hidden_layers=1), m.eagle3(
        "midlayer", 3, False, False, m.hidden // 4
    )


def _speculators(m: Maker, kind: str, layer: Config, **fields: Any) -> Config:
    return {
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "tiny", "architectures": m.target.architectures or []},
        },
        "transformer_layer_config": layer,
        **fields,
    }


def _speculators_eagle3(m: Maker) -> tuple[Config, dict[str, Tensor]]:
    """Qwen3's layer with biases, heads of its own size, EAGLE 3.1's norms, and a stretched rotation."""
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    layer = m.sizes(model_type="qwen3", num_hidden_layers=1, head_dim=16, attention_bias=True, rope_parameters=rope)
    tensors = m.eagle3("layers.0", 2, True, True, 16)
    tensors |= {f"fc_norm.{i}.weight": m.scale(m.hidden) for i in range(2)}
    flags = {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "norm_before_fc": False}
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 4], "draft_vocab_size": m.words - 3}
    return _speculators(m, "eagle3", layer, **flags, **ids), tensors


def _speculators_eagle3_own_rows(m: Maker) -> tuple[Config, dict[str, Tensor]]:
    """One norm over all states, and input rows that were trained."""
    layer = m.sizes(model_type="llama", num_hidden_layers=1, rope_theta=10000.0)
    tensors = m.eagle3("layers.0", 3, False, False, m.hidden // 4)
    tensors |= {"input_norm.weight": m.scale(3 * m.hidden), "embed_tokens.weight": m.weight(m.words, m.hidden, gain=4)}
    flags = {"norm_before_fc": True, "embed_requires_grad": True, "draft_vocab_size": m.words - 3}
    return _speculators(m, "eagle3", layer, **flags, eagle_aux_hidden_state_layer_ids=[1, 2, 3]), tensors


def _dflash(m: Maker, num_taps: int) -> dict[str, Tensor]:
    tensors = {
        "fc.weight": m.weight(m.hidden, num_taps * m.hidden),
        "hidden_norm.weight": m.scale(m.hidden),
        "norm.weight": m.scale(m.hidden),
    }
    return tensors | m.layer("layers.0", m.hidden, 8, True) | m.layer("layers.1", m.hidden, 8, True)


def _authors_dflash(m: Maker) -> tuple[Config, dict[str, Tensor]]:
    own = {"mask_token_id": 5, "target_layer_ids": [0, 1, 3]}
    sizes = m.sizes(model_type="qwen3", num_hidden_layers=2, head_dim=8, rope_theta=20000.0, block_size=4)
    return {**sizes, "dflash_config": own, "num_target_layers": 4}, _dflash(m, 3)


def _speculators_dflash(m: Maker) -> tuple[Config, dict[str, Tensor]]:
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    layer = m.sizes(model_type="qwen3", num_hidden_layers=2, head_dim=8, rope_parameters=rope)
    fields = {
        "aux_hidden_state_layer_ids": [2, 4],
        "block_size": 5,
        "mask_token_id": 3,
        "draft_vocab_size": m.words - 3,
    }
    tensors = _dflash(m, 2) | {"lm_head.weight": m.weight(m.words - 3, m.hidden, gain=3)} | m.trimmed(m.words - 3)
    return _speculators(m, "dflash", layer, **fields), tensors


def _authors_medusa(m: Maker) -> tuple[Config, dict[str, Tensor]]:
    tensors = {}
    for k in range(3):
        tensors |= {f"{k}.0.linear.weight": m.weight(m.hidden, m.hidden), f"{k}.0.linear.bias": m.weight(m.hidden)}
        tensors[f"{k}.1.weight"] = m.weight(m.words, m.hidden, gain=3)
    return {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}, tensors


def _vllm_medusa(m: Maker) -> tuple[Config, dict[str, Tensor]]:
    """One output matrix for all heads, over a part of the vocabulary; two blocks a head, without biases."""
    kept = torch.randperm(m.words, generator=m.generator)[: m.words - 3].sort().values
    tensors = {f"blocks.{k}.layers.{b}.weight": m.weight(m.hidden, m.hidden) for k in range(3) for b in range(2)}
    tensors |= {"lm_heads.0.weight": m.weight(len(kept), m.hidden, gain=3), "token_map": kept}
    sizes = {"hidden_size": m.hidden, "vocab_size": m.words, "truncated_vocab_size": len(kept)}
    own = {"num_heads": 3, "num_hidden_layers": 2, "original_lm_head": True, "medusa_fc_bias": False}
    return {"model_type": "medusa", **sizes, **own}, tensors


LAYOUTS = {
    "eagle3 of its authors": ("eagle3", _authors_eagle3),
    "eagle3 of speculators": ("eagle3", _speculators_eagle3),
    "eagle3 with rows of its own": ("eagle3", _speculators_eagle3_own_rows),
    "dflash of its authors": ("block", _authors_dflash),
    "dflash of speculators": ("block", _speculators_dflash),
    "medusa of its authors": ("medusa", _authors_medusa),
    "medusa of vllm": ("medusa", _vllm_medusa),
}
"""The drafter that reads it, and what makes one."""


def make(layout: str, target_config: Any, folder: Path, seed: int = 0) -> str:
    """Write a random head of this layout."""
    return write(folder, *LAYOUTS[layout][1](Maker(target_config, seed)))
