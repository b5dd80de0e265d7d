"""Served draft heads against their specification: in chunks, along accepted paths, after cached prefixes; broken."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.cache.blocks import BlockPool
from outrider.cache.ledger import Ledger
from outrider.cache.pages import Pages
from outrider.config import EngineConfig
from outrider.control.cost import PassCost
from outrider.control.depth import Control
from outrider.drafters import tap_fed
from outrider.drafters.base import Ask, Commit, Needs, Workshop
from outrider.drafters.trees import Expand, Level
from outrider.engine.drafter_probe import probe_drafter
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.errors import ConfigError
from outrider.kernels import select
from outrider.models.heads import files, stage
from outrider.models.lean import LeanModel
from outrider.models.loader import assemble
from outrider.models.target import Target
from outrider.registry import DRAFTERS, NEED_WEIGHTS, TRAINED
from outrider.request import Request, SamplingParams
from tests import artefacts
from tests import reference_heads as golden
from tests.models.tiny import make_module, make_target, make_tokenizer
from tests.toy import make_request

VOCAB = 16
"""Few tokens, so that random guesses are right now and then."""
BLOCK = 4
CPU = torch.device("cpu")


def module() -> Any:
    return make_module("llama", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4)


def target(way: str, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Of the same module, on either way; "native" records its verbs, and packs drafts in float32 for once."""
    made = module()
    if way == "module":
        return make_target(made, make_tokenizer(VOCAB))
    kernels = select("auto" if way == "native" else "plain", CPU)
    if way == "native":
        if kernels.name != way:
            pytest.skip("no compiler is installed here")
        monkeypatch.setattr("outrider.models.heads.layer.pack", lambda *a: stage.pack(*a[:3], "float32", *a[4:]))
    lean = LeanModel.from_module(made, kernels)
    assert lean is not None
    return assemble("tiny", lean, "float32", CPU, kernels, make_tokenizer(VOCAB), made.config, made.generation_config)


@dataclass
class Watched:
    """A drafter whose laws are written down: after which tokens, along which path, which logits and how much trust."""

    inner: Any
    laws: list[tuple[Request, list[int], list[int], Tensor, float | None]] = field(default_factory=list)
    blind: dict[int, range] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trees = self.inner.trees
        self._grow, trees.grow = trees.grow, self.grow
        self._observe, self.inner.observe = self.inner.observe, self.observe

    def observe(self, batch: Any, output: Any, commits: Sequence[Commit]) -> None:
        for commit in commits:  # what was cached when the request began has taps that nobody saw
            self.blind.setdefault(commit.request.id, range(commit.seen, commit.start + 1))
        self._observe(batch, output, commits)

    def grow(self, asks: Sequence[Ask], logits: Tensor, expand: Expand, trust: Sequence[float] | None = None) -> Any:
        paths: list[list[int]] = [[] for _ in asks]
        self._note(asks, paths, logits, trust)

        def watch(level: Level) -> tuple[Tensor, Sequence[float] | None]:
            nonlocal paths
            paths = [[*paths[origin], token] for origin, token in zip(level.origins, level.tokens, strict=True)]
            found, doubts = expand(level)
            self._note(level.asks, paths, found, doubts)
            return found, doubts

        return self._grow(asks, logits, watch, trust)

    def _note(self, asks: Sequence[Ask], paths: list[list[int]], logits: Tensor, trust: Sequence[float] | None) -> None:
        for index, (ask, path) in enumerate(zip(asks, paths, strict=True)):
            known = ask.request.tokens(0, ask.request.num_tokens)
            doubt = None if trust is None else trust[index]
            self.laws.append((ask.request, known, path, logits[index].clone(), doubt))


def build(
    name: str | None, made: Target, artefact: str = "", max_rows: int = 64, width: int = 3, acceptance: str = "match"
) -> Engine:
    blocks = 80
    pages = made.make_pages(blocks * BLOCK)
    drafter = own = None
    if name is not None:
        config = EngineConfig(model="tiny", drafter=name, drafter_model=artefact, acceptance=acceptance)
        drafter = DRAFTERS[name](Workshop(made, config))
        own = Pages(list(drafter.needs.stack), blocks * BLOCK, torch.float32, CPU) if drafter.needs.stack else None
        drafter.place(pages, own, BLOCK)
    needs = drafter.needs if drafter else Needs()
    ledger = Ledger(BlockPool(blocks, BLOCK), (name,) if name and needs.stack else (), True)
    control = Control(PassCost({1: 1.0, 64: 2.0}), 4 if drafter else 0, width, adaptive=False)
    return Engine(made, pages, Scheduler(ledger, needs, 8, max_rows, 90), drafter, control, acceptance)


def serve(engine: Engine, prompts: Sequence[Sequence[int]], first: int = 0, max_tokens: int = 24) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3)
    requests = [make_request(first + i, prompt, params) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while not engine.scheduler.is_idle:
        engine.step()
    return requests


def texts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)]


class Oracle:
    """The specification's logits, over taps that Transformers itself gives."""

    def __init__(self, artefact: files.Artefact) -> None:
        self.artefact = artefact
        self.module = module()
        embedding = self.module.get_input_embeddings().weight.detach()
        positions = torch.arange(96)[None]
        with torch.no_grad():
            cos, sin = self.module.model.rotary_emb(embedding, positions)
        half = cos.shape[-1] // 2
        self.world = golden.World(
            embedding,
            self.module.lm_head.weight.detach(),
            cos[0, :, :half],
            sin[0, :, :half],
            self.module.config.head_dim,
            self.module.config.rms_norm_eps,
        )

    def law(self, known: list[int], path: list[int], blind: range) -> tuple[Tensor, float | None]:
        kind = self.artefact.drafter
        if kind == "small_model":
            return self._small(known + path), None
        states = self._states(known + path)
        if kind == "early_exit":
            weight = golden.tensors(self.artefact)["norm.weight"]
            tap = states[self.artefact.config["exit_layers"] - 1][-1].double()
            return self.world.head.double() @ golden.rms(tap, weight, self.world.eps), None
        taps = [states[layer][: len(known)] for layer in self.artefact.config["taps"]]
        if kind == "medusa":
            return golden.medusa(self.artefact, self.world, known, taps, path), None
        if kind == "eagle3":
            return golden.eagle3(self.artefact, self.world, known, taps, path, blind), None
        return golden.block(self.artefact, self.world, known, taps, path, blind)

    def _states(self, tokens: list[int]) -> list[Tensor]:
        """The output of every layer: (T, H)."""
        states: list[Tensor] = []
        hooks = [layer.register_forward_hook(lambda *a: states.append(a[2])) for layer in self.module.model.layers]
        with torch.no_grad():
            self.module(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return [(state[0] if isinstance(state, tuple) else state)[0] for state in states]

    def _small(self, tokens: list[int]) -> Tensor:
        """Transformers' own Llama over the artefact's vocabulary."""
        kept = self.artefact.kept_ids().tolist()
        buckets = self.artefact.config["num_buckets"]
        ids = [kept.index(t) if t in kept else len(kept) + t % buckets for t in tokens]
        llama = LlamaForCausalLM(LlamaConfig(**self.artefact.config["llama"]))
        state = {name: tensor.float() for name, tensor in self.artefact.tensors.items() if name != "kept_ids"}
        missing = llama.load_state_dict(state, strict=False)
        assert missing.missing_keys in ([], ["lm_head.weight"])
        assert missing.unexpected_keys == []
        llama.tie_weights()
        with torch.no_grad():
            return llama(torch.tensor([ids])).logits[0, -1, : len(kept)].double()


def agrees(name: str, made: Target, folder: str) -> None:
    """A served artefact says what the specification says of it.

    Prompts in chunks of seven rows beside decoding ones, accepted paths, then prompts with cached prefixes.
    """
    engine = build(name, made, folder, max_rows=7)
    watched = Watched(engine.drafter)
    prompts = texts(4)
    cold = serve(engine, prompts)
    warm = serve(engine, [[*prompts[0], *cold[0].output[:9]], [*prompts[2], 5, 6, 7]], first=4)
    assert sum(request.tally.accepted for request in cold) > 5
    assert any(request.num_cached for request in warm)
    oracle = Oracle(files.read(files.locate(folder)))
    rng = random.Random(1)
    compared = 0
    for request, known, path, logits, trust in rng.sample(watched.laws, min(36, len(watched.laws))):
        expected, confidence = oracle.law(known, path, watched.blind[request.id])
        torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)
        assert (confidence is None) == (trust is None)
        if trust is not None:
            assert trust == pytest.approx(confidence, abs=1e-4)
        compared += bool(path)
    assert compared > 10


@pytest.mark.parametrize("way", ["native", "lean", "module"])
@pytest.mark.parametrize("name", artefacts.KINDS)
def test_laws_are_those_of_the_specification(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = target(way, monkeypatch)
    folder = artefacts.folder(name, made)
    agrees(name, made, folder)


def test_every_drafter_that_is_trained_is_tested_here() -> None:
    """A new one fails until it has random weights, and a tensor to break."""
    assert set(artefacts.KINDS) == set(BROKEN) == set(TRAINED) >= set(NEED_WEIGHTS)


BROKEN = {
    "eagle3": "head.weight",
    "block": "markov_out.weight",
    "medusa": "in_proj.weight",
    "small_model": "model.norm.weight",
    "early_exit": "norm.weight",
}
"""A tensor of each kind that reaches its logits."""


@pytest.mark.parametrize("way", ["native", "lean"])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("name", artefacts.KINDS)
def test_guesses_that_are_no_numbers_change_nothing(
    name: str, way: str, acceptance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 12: an all-NaN draft row."""
    made = target(way, monkeypatch)
    artefact = artefacts.make(name, made)
    broken = {**artefact.tensors, BROKEN[name]: torch.full_like(artefact.tensors[BROKEN[name]], torch.nan)}
    files.write(tmp_path / "a", artefact.config, broken, {}, "")
    plain = serve(build(None, made), texts(3))
    guessed = serve(build(name, made, str(tmp_path / "a"), acceptance=acceptance), texts(3))
    assert all(request.error is None for request in guessed)
    assert all(len(request.output) == 24 for request in guessed)
    if acceptance == "match":
        assert [request.output for request in guessed] == [request.output for request in plain]


# An exit's norm alone is never at chance: its states and its head are the target's own.
@pytest.mark.parametrize("name", [name for name in artefacts.KINDS if name != "early_exit"])
def test_weights_that_know_nothing_of_the_target_are_found_out(name: str, tmp_path: Path) -> None:
    """Fault 34: a head trained for another target (random, here) agrees by chance alone."""
    made = make_target(make_module("llama"))
    engine = build(name, made, str(artefacts.write(tmp_path / "a", name, made, seed=1)), width=1)
    with pytest.raises(ConfigError, match="no better than chance"):
        probe_drafter(engine)
    assert engine.scheduler.is_idle
    assert engine.ledger.pool.num_held == 0


@pytest.mark.parametrize("name", ["eagle3", "block", "medusa"])
def test_long_stretches_without_guesses_keep_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth 0 for many cycles: what waits is bounded, and nothing is left when a request ends."""
    monkeypatch.setattr(tap_fed, "MOST_PENDING", 0)
    made = target("lean", pytest.MonkeyPatch())
    engine = build(name, made, artefacts.folder(name, made))
    drafter: Any = engine.drafter
    waiting = []
    observe = drafter.observe

    def watch(*args: Any) -> None:
        observe(*args)
        held = drafter._taps.values() if name == "medusa" else drafter._feed._pending.values()
        waiting.append(max(1 if name == "medusa" else pending.num_rows for pending in held))

    drafter.observe = watch
    params = SamplingParams(max_tokens=60, speculation=False)
    request = make_request(0, texts(1)[0], params)
    engine.add(request)
    while not engine.scheduler.is_idle:
        engine.step()
    assert request.tally.drafted == 0
    assert max(waiting) <= tap_fed.IN_USE + 1
    assert not (drafter._taps if name == "medusa" else drafter._feed._pending)


@pytest.mark.parametrize("name", ["eagle3", "block"])
@pytest.mark.parametrize("speculation", [False, True])
def test_a_head_that_is_not_asked_runs_no_layer(name: str, speculation: bool) -> None:
    """Taps wait for a proposal; where none came they are dropped, but for a request that never wanted guesses."""
    made = target("lean", pytest.MonkeyPatch())
    engine = build(name, made, artefacts.folder(name, made))
    drafter: Any = engine.drafter
    written = []
    write = drafter.write
    drafter.write = lambda batch, taps: written.append(batch.num_rows) or write(batch, taps)
    engine.control.budget = lambda *asked: {}
    request = make_request(0, texts(1)[0], SamplingParams(max_tokens=60, speculation=speculation))
    engine.add(request)
    while not engine.scheduler.is_idle:
        engine.step()
    assert sum(written) == (0 if speculation else request.num_tokens - 1)
