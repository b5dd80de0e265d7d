"""Each draft module's guesses against a slow reading of its definition: one conversation, one position at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import silu
from transformers import LlamaForCausalLM

from outrider.training.block import Block, drawn
from outrider.training.eagle3 import Eagle3
from outrider.training.harvest import Features, Harvester
from outrider.training.losses import Arithmetic, Scores, divergence
from outrider.training.medusa import Medusa
from outrider.training.small_model import SmallModel
from tests.models.tiny import VOCAB, make_module
from tests.training.test_harvest import make_batch

KEPT = torch.arange(0, VOCAB, 2)
EPS = 1e-6


class Watcher(Arithmetic):
    """Keeps the draft logits of every call of `score`."""

    def __init__(self) -> None:
        super().__init__("forward_kl", 64)
        object.__setattr__(self, "seen", [])

    def score(self, draft, rows, law) -> Scores:
        self.seen.append(draft(*rows).detach())
        return super().score(draft, rows, law)


@pytest.fixture(scope="module")
def target():
    return make_module("llama", num_hidden_layers=6, tie_word_embeddings=True, rms_norm_eps=EPS)


def watched(target, module, seed=0, kept=KEPT, silent=()) -> tuple[Features, list[torch.Tensor]]:
    """One batch through a module whose every weight is far from its beginning: features, and draft logits by level.

    silent: parameters that are zero.
    """
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() < 2 else 0.15))
        for parameter in silent:
            parameter.zero_()
    arithmetic = Watcher()
    batch = make_batch()
    features = Harvester(target, kept, module.taps, VOCAB, arithmetic)(batch)
    loss, counts = module.loss(batch, features)
    assert torch.isfinite(loss)
    assert (counts.hits <= counts.rows).all()
    return replace(features), arithmetic.seen


def rms(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rope(x, position, theta=10000.0):
    """x: (heads, D). Half-split rotary embedding as Llama's."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([x[:, :half] * cos - x[:, half:] * sin, x[:, half:] * cos + x[:, :half] * sin], dim=-1)


def attention(query, keys, values, groups):
    """query: (h, D); keys, values: lists of (h_kv, D), one a visible position."""
    keys, values = (torch.stack(x).repeat_interleave(groups, dim=1) for x in (keys, values))
    weights = (torch.einsum("hd,khd->hk", query, keys) / math.sqrt(query.shape[-1])).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, values).flatten()


def taps_before(features, module, b, position):
    """The concatenated taps that the entry at `position` uses, normed one by one."""
    size = module.shape.hidden
    taps = [features.taps[t][b, position - 1] if position else torch.zeros(size) for t in module.taps]
    return torch.cat([rms(tap, module.tap_norms[i]) for i, tap in enumerate(taps)])


def mlp(layer, x):
    m = rms(x, layer.post_norm.weight)
    return x + layer.down_proj(silu(layer.gate_proj(m)) * layer.up_proj(m))


@torch.no_grad()
def test_eagle3_unrolls_as_it_is_served(target):
    module = Eagle3.initialise(target, KEPT, unroll=4)
    features, seen = watched(target, module)
    batch = make_batch()
    heads = module.shape.head_dim

    def entry(token, feature, position):
        a, b = rms(features.embedding[token], module.embed_norm.weight), rms(feature, module.feature_norm.weight)
        pair = torch.cat([a, b])
        q, k, v = (proj(pair).view(-1, heads) for proj in (module.q_proj, module.k_proj, module.v_proj))
        return rope(q, position), rope(k, position), v

    def state(feature, query, keys, values):
        x = feature + module.o_proj(attention(query, keys, values, 2))
        return rms(mlp(module, x), module.final_norm.weight)

    compared = 0
    for b in range(len(batch.tokens)):
        tokens, reply, first = batch.tokens[b].tolist(), int(batch.replies[b]), int(batch.firsts[b])
        count = int(batch.lengths[b]) - reply
        features_at = [module.fc(taps_before(features, module, b, j)) for j in range(reply + count)]
        entries = [entry(tokens[j], features_at[j], j) for j in range(reply + count)]
        for start in range(0, count - 4, 5):
            anchor = reply - 1 + start  # the last known token
            seen_first = min(1, anchor)  # nobody but itself sees entry 0
            keys, values = ([e[i] for e in entries[seen_first : anchor + 1]] for i in (1, 2))
            fed = state(features_at[anchor], entries[anchor][0], keys, values)
            for level in range(4):
                logits = module.head(fed)
                torch.testing.assert_close(seen[level][first + start + level], logits, rtol=2e-4, atol=2e-4)
                compared += 1
                q, k, v = entry(tokens[anchor + level + 1], fed, anchor + level + 1)
                keys, values = [*keys, k], [*values, v]
                fed = state(fed, q, keys, values)
    assert compared >= 40


@torch.no_grad()
def test_blocks_are_drafted_as_they_are_served(target):
    module = Block.initialise(target, KEPT, block_size=4, num_anchors=5, markov_rank=6)
    torch.nn.init.normal_(module.markov_carry.weight)
    torch.nn.init.normal_(module.markov_out.weight)
    features, (seen,) = watched(target, module)
    batch = make_batch()
    heads = module.shape.head_dim
    offsets = drawn(batch, module.num_anchors)
    assert module.taps == (1, 2, 2, 2, 3)
    index = {int(token): place for place, token in enumerate(KEPT)}
    rows = seen.view(len(batch.tokens), 5, 4, -1)
    for b in range(len(batch.tokens)):
        tokens, reply = batch.tokens[b].tolist(), int(batch.replies[b])
        for a, offset in enumerate(offsets[b].tolist()):
            assert 0 <= offset < int(batch.lengths[b]) - reply
            anchor = reply - 1 + offset
            context = [
                rms(module.fc(taps_before(features, module, b, j)), module.ctx_norm.weight) for j in range(anchor + 1)
            ]
            x = [features.embedding[tokens[anchor]], *[module.mask] * 3]
            for layer in module.layers:
                h = [rms(row, layer.input_norm.weight) for row in x]

                def kv(states, first, layer=layer):
                    return [
                        (rope(layer.k_proj(s).view(-1, heads), first + i), layer.v_proj(s).view(-1, heads))
                        for i, s in enumerate(states)
                    ]

                pairs = kv(context, 0) + kv(h, anchor)
                mixed = [
                    attention(
                        rope(layer.q_proj(h[i]).view(-1, heads), anchor + i),
                        [k for k, _ in pairs[1 : anchor + 2 + i]],
                        [v for _, v in pairs[1 : anchor + 2 + i]],
                        2,
                    )
                    for i in range(4)
                ]
                x = [mlp(layer, row + layer.o_proj(m)) for row, m in zip(x, mixed, strict=True)]
            code = torch.zeros(6)
            for i in range(min(4, int(batch.lengths[b]) - reply - offset)):
                logits = features.head @ module.adapter(rms(x[i], module.final_norm.weight))
                before = tokens[anchor + i]
                if i:
                    known = module.markov_in.weight[index[before]] if before in index else 0
                    code = known + module.markov_carry(code.tanh())
                    gate = 1 + module.markov_gate(rms(x[i], module.final_norm.weight))
                    logits = logits + module.markov_out(code * gate)
                torch.testing.assert_close(rows[b, a, i], logits, rtol=2e-4, atol=2e-4)


def test_the_blocks_confidence_learns_what_is_accepted(target):
    """With everything else frozen, its gradient is that of the cross-entropy with 1 - TV."""
    module = Block.initialise(target, KEPT, block_size=3, num_anchors=4, markov_rank=6)
    features, (seen,) = watched(target, module)
    batch = make_batch()
    module.zero_grad()
    module.loss(batch, features)[0].backward()
    steps = drawn(batch, module.num_anchors)[..., None] + torch.arange(3)
    inside = steps < (batch.lengths - batch.replies)[:, None, None]
    entries = (batch.firsts[:, None, None] + steps).flatten()[inside.flatten()]
    alpha = divergence("tv", seen[inside.flatten()], features.law.logits[entries], features.law.log_z[entries])[1]
    assert 0 < alpha.min() <= alpha.max() < 1
    assert module.confidence_bias.grad.abs() > 0
    with torch.no_grad():  # far too sure: the gradient must pull it down
        module.confidence_bias.fill_(20.0)
    module.zero_grad()
    module.loss(batch, features)[0].backward()
    assert module.confidence_bias.grad.item() > 0.3


@torch.no_grad()
def test_medusas_heads_see_the_state_before_and_the_last_token(target):
    module = Medusa.initialise(target, KEPT, num_heads=3)
    features, seen = watched(target, module)
    batch = make_batch()
    for b in range(len(batch.tokens)):
        reply, first = int(batch.replies[b]), int(batch.firsts[b])
        for start in range(int(batch.lengths[b]) - reply - 3):
            last = reply - 1 + start
            h = [rms(features.taps[tap][b, last - 1], module.tap_norms[i]) for i, tap in enumerate((2, 4, 5))]
            e = rms(features.embedding[batch.tokens[b, last]], module.embed_norm.weight)
            for k in range(3):
                z = h[-1] + module.in_proj(torch.cat([*h, e]))
                for block in module.heads[k]:
                    z = z + block.down(silu(block.up(z)))
                torch.testing.assert_close(seen[k][first + start + k], features.head @ z, rtol=2e-4, atol=2e-4)


def test_a_fresh_medusa_says_what_the_target_said(target):
    """Its norm and head are the target's own, and everything else begins as nothing."""
    module = Medusa.initialise(target, torch.arange(VOCAB), num_heads=2)
    batch = make_batch()
    arithmetic = Watcher()
    features = Harvester(target, torch.arange(VOCAB), module.taps, VOCAB, arithmetic)(batch)
    module.loss(batch, features)
    inner = batch.offsets > 0
    before = features.law.logits[inner.nonzero()[:, 0] - 1]
    torch.testing.assert_close(arithmetic.seen[0][inner], before, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_small_model_is_a_llama_of_its_artefact(target):
    module = SmallModel.initialise(
        target, KEPT, hidden=16, num_layers=2, num_heads=2, head_dim=8, intermediate=32, num_buckets=5
    )
    _, (logits,) = watched(target, module)
    batch = make_batch()
    llama = LlamaForCausalLM(module.llama_config).eval()
    missing = llama.load_state_dict({k: v for k, v in module.state_dict().items() if k != "kept_ids"}, strict=False)
    assert not missing.unexpected_keys
    llama.tie_weights()
    for b, length in enumerate(batch.lengths.tolist()):
        ids = [t // 2 if t % 2 == 0 else len(KEPT) + t % 5 for t in batch.tokens[b, :length].tolist()]
        own = llama(input_ids=torch.tensor([ids])).logits[0, int(batch.replies[b]) - 1 : length - 1, : len(KEPT)]
        first = int(batch.firsts[b])
        torch.testing.assert_close(logits[first : first + len(own)], own, rtol=1e-4, atol=1e-4)


def test_the_default_small_model_is_a_twentieth_of_its_target():
    """SmolLM2-135M has 134.5M parameters."""
    shape = replace(Block.initialise(make_module("llama"), KEPT).shape, vocab_size=49152, max_positions=8192)
    module = SmallModel(shape, torch.arange(16384))
    assert sum(parameter.numel() for parameter in module.parameters()) <= 0.05 * 134.5e6


@pytest.mark.parametrize("kind", [Eagle3, Block])
def test_a_target_without_rotary_positions_is_refused(kind):
    from outrider.errors import ModelError

    with pytest.raises(ModelError, match="medusa"):
        kind.initialise(make_module("gpt2"), KEPT)


@pytest.mark.parametrize("kind", [Eagle3, Block, Medusa, SmallModel])
def test_artefacts_are_bfloat16_and_share_nothing(target, kind):
    module = kind.initialise(target, KEPT)
    tensors = module.tensors()
    assert tensors["kept_ids"].dtype == torch.int32
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())
    assert {t.dtype for name, t in tensors.items() if name not in ("kept_ids", "rates")} == {torch.bfloat16}
    assert len({t.data_ptr() for t in tensors.values()}) == len(tensors)
