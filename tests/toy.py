"""A toy target whose logits are a hash of exactly the tokens that a row sees through its slots.

Any wrong slot, stale key, wrong path or wrong position changes its text, so engine tests compare against `plain_text`,
which knows nothing of slots.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.cache.blocks import BlockPool
from outrider.cache.ledger import Ledger
from outrider.cache.pages import Pages, PageSpec
from outrider.config import EngineConfig
from outrider.control.cost import PassCost
from outrider.control.depth import Control
from outrider.drafters.base import Drafter, Needs, Workshop
from outrider.drafters.cascade import build
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.kernels.base import Linear
from outrider.kernels.noise import gumbel
from outrider.kernels.plain import PlainKernels
from outrider.models.batch import FlatBatch, TargetOutput
from outrider.request import Request, SamplingParams
from tests import artefacts, other_words

VOCAB = 23
HIDDEN = 8
NEWLINE = VOCAB - 1
OTHER_WORDS = " of other words"
"""Behind a drafter's name: its model is of another vocabulary than the toy's (`tests/other_words`)."""
MEMORY = 5
"""The law depends on so many last tokens, so that texts repeat themselves and lookups sometimes hit."""


def law(tokens: Sequence[int], layers: int = 2) -> Tensor:
    """(V,) float32 logits after `tokens`; fewer layers see one token less and so are wrong at times."""
    return _law(bytes(tokens[-(MEMORY - (2 - layers)) :]))


@functools.lru_cache(maxsize=100_000)
def _law(seen: bytes) -> Tensor:
    digest = hashlib.blake2b(seen, digest_size=32).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    logits = torch.randn(VOCAB, generator=generator) * 2
    logits[seen[-1] * 7 % VOCAB] += 4  # most of it hangs on the last token alone: drafts are right at times
    return logits


@functools.lru_cache(maxsize=100_000)
def tap(seen: bytes, layer: int) -> Tensor:
    """(H,) float32 hidden state after a layer; it hangs on the tokens seen, and on nothing else."""
    digest = hashlib.blake2b(seen[-MEMORY:] + bytes([layer]), digest_size=8).digest()
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7])))


@functools.lru_cache(maxsize=100_000)
def noise(seed: int, sample: int, position: int) -> Tensor:
    """(V,) float64 Gumbel noise of one key: a function of nothing else, so that it is made once for all engines."""
    return gumbel(torch.tensor([seed]), torch.tensor([sample]), torch.tensor([position]), VOCAB)[0]


class ToyKernels(PlainKernels):
    """The keyed draw by its definition, one row at a time; what draft heads need is PyTorch's."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), width=4)

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        drawn = []
        keys = (temperature.tolist(), seeds.tolist(), samples.tolist(), positions.tolist())
        for row, heat, *key in zip(logits, *keys, strict=True):
            scores = row.double()
            if heat > 0:
                scores = scores / heat + noise(*key)
            has_law = not scores.isnan().any() and scores.max() > -torch.inf
            drawn.append(int(scores.argmax()) if has_law else -1)
        return torch.tensor(drawn)

    def gumbel(self, seeds: Tensor, samples: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        return gumbel(seeds, samples, positions, vocab_size)


class ToyTokenizer:
    """Letters from a on; the last id is a newline."""

    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {self.decode([token]): token for token in range(VOCAB)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [NEWLINE if c == "\n" else ord(c) - 97 for c in text]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join("\n" if token == NEWLINE else chr(97 + token) for token in ids)


class ToyModel:
    """What draft heads read of a target: its embedding, its head, and that it rotates nothing."""

    def __init__(self, kernels: ToyKernels) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head = kernels.pack(torch.randn(VOCAB, HIDDEN, generator=generator))

    def embed(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        rows = self.embedding[tokens]
        return rows if out is None else out.copy_(rows)

    def head_rows(self, ids: Tensor | None) -> Linear:
        return self.head if ids is None else self.head.rows(ids)

    def rotary(self) -> tuple[Tensor, Tensor]:
        none = torch.empty(1000, 0)
        return none, none


@dataclass(frozen=True)
class ToyConfig:
    model_type: str = "toy"
    head_dim: int = 1

    def get_text_config(self, decoder: bool) -> ToyConfig:
        return self


@dataclass
class ToyTarget:
    """What the engine and the drafters ask of a target, on two layers that store the token itself as key."""

    fail_on: int | None = None
    vocab_size: int = VOCAB
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    page_dtype: torch.dtype = torch.float32
    max_positions: int = 200
    num_layers: int = 2
    eos_ids: frozenset[int] = frozenset()
    nbytes: int = 0
    name: str = "toy"
    original: None = None
    hidden_size: int = HIDDEN
    fixed_width: int | None = None
    config: ToyConfig = field(default_factory=ToyConfig)
    tokenizer: ToyTokenizer = field(default_factory=ToyTokenizer)
    num_rows: int = 0

    def __post_init__(self) -> None:
        self.kernels = ToyKernels()
        self.model = ToyModel(self.kernels)
        self.page_specs = [PageSpec(1, 1, 1)] * self.num_layers

    def forward(
        self, batch: FlatBatch, pages: Pages, num_layers: int | None = None, taps: tuple[int, ...] = ()
    ) -> TargetOutput:
        keys = batch.keys
        self.num_rows += batch.num_rows
        assert int(batch.tokens.min()) >= 0
        assert int(batch.tokens.max()) < self.vocab_size
        written = set(zip(batch.slots.tolist(), batch.tokens.tolist(), batch.positions.tolist(), strict=True))
        # A drafter that lags may write a shared prefix for two requests at once: the same keys, then.
        assert len({slot for slot, *_ in written}) == len(written), "two rows of a pass write other keys into one slot"
        for layer in range(num_layers or self.num_layers):
            pages.keys[layer][batch.slots.long(), 0, 0] = batch.tokens.float()
            pages.values[layer][batch.slots.long(), 0, 0] = batch.positions.float()
        rows = range(batch.num_rows) if batch.logit_rows is None else batch.logit_rows.tolist()
        logits = torch.empty(len(rows), self.vocab_size)
        tapped = {layer: torch.empty(batch.num_rows, HIDDEN) for layer in taps}
        tables, tails, asked = keys.tables.tolist(), keys.tails.tolist(), set(rows)
        requests, linears, lengths = keys.request.tolist(), keys.linear.tolist(), keys.length.tolist()
        for row in range(batch.num_rows):
            if not taps and row not in asked:
                continue
            table, linear, length = tables[requests[row]], linears[row], lengths[row]
            slots = [table[x // keys.block_size] * keys.block_size + x % keys.block_size for x in range(linear)]
            slots += tails[row][: length - linear]
            layer = (num_layers or self.num_layers) - 1
            seen = pages.keys[layer][slots, 0, 0].int().tolist()
            assert pages.values[layer][slots, 0, 0].int().tolist() == list(range(length)), "keys out of position order"
            for layer, states in tapped.items():
                states[row] = tap(bytes(seen), layer)
            if row not in asked:
                continue
            logits[rows.index(row)] = self.law(seen, num_layers or 2)
            if self.fail_on is not None and self.fail_on in seen:
                logits[rows.index(row)] = torch.nan
        return TargetOutput(logits, tapped)

    def law(self, seen: Sequence[int], layers: int) -> Tensor:
        """(V,) float32 logits after these ids."""
        return law(seen, layers)

    def make_pages(self, num_slots: int) -> Pages:
        return Pages(self.page_specs, num_slots, self.page_dtype, self.device)


def make_engine(
    drafter: str = "none",
    *,
    depth: int = 4,
    width: int = 1,
    blocks: int = 60,
    block_size: int = 4,
    max_rows: int = 64,
    max_requests: int = 16,
    adaptive: bool = False,
    acceptance: str = "match",
    prefix_cache: bool = True,
    target: ToyTarget | None = None,
    in_flight: int = 0,
    **settings: Any,
) -> Engine:
    """An engine over the toy target, as `engine/resolve` puts one together; `settings` are the drafter's."""
    target = target or ToyTarget()
    made, drafter = drafter, drafter.removesuffix(OTHER_WORDS)
    settings |= artefacts.settings(drafter, target)
    config = EngineConfig(model="toy", drafter=drafter, acceptance=acceptance, **settings)
    if made.endswith(OTHER_WORDS):
        guess: Drafter | None = other_words.drafter(Workshop(target, config))  # type: ignore[arg-type]
    else:
        guess = None if drafter == "none" else build(drafter, Workshop(target, config))  # type: ignore[arg-type]
    needs = guess.needs if guess else Needs()
    pages = target.make_pages(blocks * block_size)
    if guess:
        own = Pages(list(needs.stack), blocks * block_size, torch.float32, target.device) if needs.stack else None
        guess.place(pages, own, block_size)
    ledger = Ledger(BlockPool(blocks, block_size), (drafter,) if needs.stack else (), prefix_cache)
    control = Control(
        PassCost({1: 1.0, 8: 1.2, 64: 2.0}),
        depth if guess else 0,
        width,
        adaptive=adaptive,
        extra_rows=needs.extra_rows,
    )
    scheduler = Scheduler(ledger, needs, max_requests, max_rows, target.max_positions)
    return Engine(target, pages, scheduler, guess, control, acceptance, in_flight)  # type: ignore[arg-type]


def make_request(number: int, prompt: Sequence[int], params: SamplingParams, ends: Sequence[int] = ()) -> Request:
    limit = params.max_tokens or 1
    seed = 1234 if params.seed is None else params.seed
    return Request(number, tuple(prompt), params, seed, end_ids=frozenset(ends), limit=limit)


def lines(rng: random.Random) -> list[int]:
    """A prompt in which a drafter that reads the text finds something: a line, the same again, and its beginning."""
    line = [rng.randrange(NEWLINE) for _ in range(rng.randint(2, 8))]
    return [*line, NEWLINE, *line, NEWLINE, *line[: len(line) // 2]]


def run(engine: Engine, requests: Sequence[Request], check: bool = True) -> list[list[int]]:
    """Run to the end; the books are checked after every step and must be empty at idle."""
    for request in requests:
        engine.add(request)
    while not engine.scheduler.is_idle:
        engine.step()
        if check:
            engine.ledger.check()
    for ledger in (engine.ledger, getattr(engine.drafter, "ledger", engine.ledger)):
        ledger.check()
        assert ledger.pool.num_held == 0, "slots leaked at idle"
    return [request.output for request in requests]
