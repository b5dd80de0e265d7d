"""Draft heads by their specification: dense PyTorch over a whole sequence; no kernels, no pages.

Every function takes the tokens known, the taps of their positions (one (n, H) tensor a layer, as the target gives
them) and tokens guessed beyond them, and gives logits (V_d,) float64 of what follows. `blind`: entries whose taps
nobody saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.models.heads.files import Artefact


@dataclass(frozen=True)
class World:
    """What a head reads of its target: embedding and head (V, H), rotary tables (P, D / 2), eps of the norms."""

    embedding: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor
    dim: int
    eps: float


def tensors(artefact: Artefact) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in artefact.tensors.items() if tensor.is_floating_point()}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def shift(taps: Sequence[Tensor], blind: range) -> Tensor:
    """Entry j has the taps of position j - 1; zeros for the first one, and for those in `blind`."""
    joined = torch.cat([tap.double() for tap in taps], dim=1)
    moved = torch.cat([torch.zeros_like(joined[:1]), joined[:-1]])
    moved[list(blind)] = 0
    return moved


def fuse(w: dict[str, Tensor], shifted: Tensor, eps: float) -> Tensor:
    parts = shifted.chunk(len(w["tap_norms"]), dim=1)
    return torch.cat([rms(p, n, eps) for p, n in zip(parts, w["tap_norms"], strict=True)], 1) @ w["fc.weight"].T


def rotate(x: Tensor, positions: Sequence[int], world: World) -> Tensor:
    """x: (T, h, D)."""
    c, s = (table.double()[list(positions)].unsqueeze(1) for table in (world.cos, world.sin))
    half = c.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1)


def heads(x: Tensor, weight: Tensor, world: World) -> Tensor:
    return (x @ weight.T).unflatten(-1, (-1, world.dim))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query (h, D) over all keys (K, h_kv, D): (h * D,)."""
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[1], dim=1) for t in (k, v))
    weights = torch.softmax(torch.einsum("hd,khd->hk", q, k) / q.shape[-1] ** 0.5, dim=-1)
    return torch.einsum("hk,khd->hd", weights, v).flatten()


def mlp(w: dict[str, Tensor], prefix: str, x: Tensor, eps: float) -> Tensor:
    m = rms(x, w[f"{prefix}post_norm.weight"], eps)
    gate, up = (m @ w[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (nn.functional.silu(gate) * up) @ w[f"{prefix}down_proj.weight"].T


def eagle3(
    artefact: Artefact,
    world: World,
    known: Sequence[int],
    taps: Sequence[Tensor],
    path: Sequence[int] = (),
    blind: range = range(0),
) -> Tensor:
    w, eps = tensors(artefact), world.eps
    fused = fuse(w, shift(taps, blind), eps)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    state = torch.empty(0)
    for position, token in enumerate([*known, *path]):
        feature = fused[position] if position < len(known) else state
        a = rms(world.embedding[token].double(), w["embed_norm.weight"], eps)
        pair = torch.cat([a, rms(feature, w["feature_norm.weight"], eps)])[None]
        q, k, v = (heads(pair, w[f"{part}_proj.weight"], world) for part in "qkv")
        keys.append(rotate(k, [position], world))
        values.append(v)
        first = min(1, position)  # entry 0 is seen by itself alone
        mixed = attend(rotate(q, [position], world)[0], torch.cat(keys[first:]), torch.cat(values[first:]))
        x = mlp(w, "", feature + mixed @ w["o_proj.weight"].T, eps)
        state = rms(x, w["final_norm.weight"], eps)
    return state @ w["head.weight"].T


def block(
    artefact: Artefact,
    world: World,
    known: Sequence[int],
    taps: Sequence[Tensor],
    path: Sequence[int] = (),
    blind: range = range(0),
) -> tuple[Tensor, float]:
    """Logits, and the confidence in them."""
    w, eps, kept = tensors(artefact), world.eps, artefact.kept_ids()
    context = rms(fuse(w, shift(taps, blind), eps), w["ctx_norm.weight"], eps)
    known_positions = range(len(known))
    positions = [len(known) - 1 + i for i in range(len(path) + 1)]
    x = torch.stack([world.embedding[known[-1]].double(), *[w["mask"]] * len(path)])
    for layer in range(sum(name.endswith("input_norm.weight") for name in w)):
        prefix = f"layers.{layer}."
        normed = rms(x, w[f"{prefix}input_norm.weight"], eps)
        q = rotate(heads(normed, w[f"{prefix}q_proj.weight"], world), positions, world)
        k, v = (w[f"{prefix}{part}_proj.weight"] for part in "kv")
        keys = torch.cat(
            [
                rotate(heads(context, k, world), known_positions, world),
                rotate(heads(normed, k, world), positions, world),
            ]
        )
        values = torch.cat([heads(context, v, world), heads(normed, v, world)])
        seen = [len(known) + i + 1 for i in range(len(positions))]
        mixed = torch.stack([attend(q[i], keys[1:end], values[1:end]) for i, end in enumerate(seen)])
        x = mlp(w, prefix, x + mixed @ w[f"{prefix}o_proj.weight"].T, eps)
    state = rms(x[-1], w["final_norm.weight"], eps)
    logits = world.head[kept].double() @ (w["adapter.weight"] @ state)
    score = w["confidence_state"] @ state + w["confidence_bias"][0]
    if path:
        code = torch.zeros(w["markov_in.weight"].shape[1], dtype=torch.float64)
        for token in path:
            code = w["markov_in.weight"][(kept == token).nonzero()[0, 0]] + w["markov_carry.weight"] @ code.tanh()
        before = code * (1 + w["markov_gate.weight"] @ state)
        logits = logits + w["markov_out.weight"] @ before
        score = score + w["confidence_prev"] @ before
    return logits, float(torch.sigmoid(score))


def medusa(
    artefact: Artefact, world: World, known: Sequence[int], taps: Sequence[Tensor], path: Sequence[int] = ()
) -> Tensor:
    w, eps = tensors(artefact), world.eps
    seen = [rms(tap[len(known) - 2].double(), norm, eps) for tap, norm in zip(taps, w["tap_norms"], strict=True)]
    z = seen[-1]
    if "in_proj.weight" in w:
        e = rms(world.embedding[known[-1]].double(), w["embed_norm.weight"], eps)
        z = z + w["in_proj.weight"] @ torch.cat([*seen, e])
    for b in range(2):
        name = f"heads.{len(path)}.{b}"
        gated = nn.functional.silu(w[f"{name}.up.weight"] @ z)
        z = z + (w[f"{name}.down.weight"] @ gated if f"{name}.down.weight" in w else gated)
    return world.head[artefact.kept_ids()].double() @ z
