"""A stand-in for the engine: the front door's face, with texts that follow from the prompt, and no model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from outrider.errors import RequestError
from outrider.record import Tally
from outrider.request import SamplingParams, TokenLogprob

CONTRACT = {
    "text": str,
    "token_ids": list,
    "finish_reason": str,
    "exactness": str,
    "usage": dict,
    "speculation": dict,
    "seconds": dict,
    "tokens_per_second": float,
}


@dataclass
class FakeResult:
    text: str
    token_ids: tuple[int, ...]
    seed: int
    drafter: str
    tally: Tally
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str = "length"
    exactness: str = "seed"
    prompt_tokens: int = 3
    cached_tokens: int = 0
    error: str | None = None
    tokens_per_second: float = 10.0

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name, {}) for name in CONTRACT}
        return {**data, "token_ids": list(self.token_ids), "seed": self.seed}


@dataclass
class FakeDelta:
    text: str
    token_ids: tuple[int, ...]
    num_accepted: int
    result: FakeResult | None = None


class FakeTokenizer:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(str, ids))


class FakeMemory:
    max_rows, graphs = 512, 0

    def sentence(self) -> str:
        return "weights 1 MiB"

    def table(self) -> dict[str, str]:
        return {"target's weights": "1 MiB"}


class FakeResolved:
    memory = FakeMemory()
    dtype, device, kernels, drafter, exactness = "float32", "cpu", "plain", "ngram", "seed"
    notes = ("the context is cut to 64",)

    def lines(self) -> list[str]:
        return ["dtype float32, because this is a toy"]


@dataclass
class FakeLLM:
    """Ids 0..9 from a hash of prompt, seed, sample and temperature; `broken` drafters change the id at a position."""

    model: str
    settings: dict[str, Any]
    broken: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[Any, SamplingParams, bool]] = field(default_factory=list)
    closed: bool = False
    resolved: FakeResolved = field(default_factory=FakeResolved)
    engine: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(fault=None, pipeline=None))
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)

    @property
    def drafter(self) -> str:
        return self.settings.get("drafter", "auto")

    def _result(self, prompt: Any, params: SamplingParams, sample: int) -> FakeResult:
        if prompt == "too long":
            raise RequestError("the prompt has 9 tokens and the context holds 4: shorten it")
        key = repr((prompt, params.seed, sample, params.temperature)).encode()
        ids = [byte % 10 for byte in hashlib.shake_128(key).digest(params.max_tokens or 8)]
        if self.broken.get(self.drafter, len(ids)) < len(ids):
            ids[self.broken[self.drafter]] = 99
        tally = Tally()
        if self.drafter != "none":
            tally.count(drafted=4, delivered=3)
        rows = (
            None if params.logprobs is None else tuple(TokenLogprob(i, -0.5, ((i, -0.5), (i + 1, -0.75))) for i in ids)
        )
        return FakeResult(
            "".join(map(str, ids)),
            tuple(ids),
            params.seed or 7,
            self.drafter,
            tally,
            rows,
        )

    def always_guessing(self, depth: int = 4, width: int | None = None, apart: bool = False) -> Any:
        return nullcontext()

    def generate(self, prompts: Any, params: Any = None, raw: bool = False, watch: Any = None) -> list[FakeResult]:
        many = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], dict)) else prompts
        each = params if isinstance(params, list) else [params] * len(many)
        self.asked += [(prompt, param, raw) for prompt, param in zip(many, each, strict=True)]
        return [self._result(p, w, sample) for p, w in zip(many, each, strict=True) for sample in range(w.n)]

    def stream(self, prompt: Any, params: SamplingParams, raw: bool = False) -> Iterator[FakeDelta]:
        (result,) = self.generate([prompt], params, raw)
        for i, token in enumerate(result.token_ids):
            last = i == len(result.token_ids) - 1
            yield FakeDelta(str(token), (token,), i % 2, result if last else None)

    def describe(self) -> dict[str, Any]:
        return {"device": "cpu", "notes": ["a toy"]}

    def close(self) -> None:
        self.closed = True
