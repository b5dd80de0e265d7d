"""The rows of a report on decoding: what plain and speculative cycles take, in flight and in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from outrider.control.cost import PassCost
from outrider.engine.step import Engine
from outrider.errors import ConfigError
from outrider.measure.bandwidth import Bandwidth
from outrider.measure.cycle import Decoding, TimedEngine, answer
from outrider.measure.flight import Log, decoding, flies, measure_shape
from outrider.measure.passes import key_bytes, streamed_bytes
from outrider.measure.synthetic import NOT_VALID, measure_synthetic
from outrider.models.target import Target
from outrider.request import SamplingParams

PLAIN, GREEDY = "none", "T=0"
"""No drafter; the law of peers and synthetic runs."""
LAWS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "T=0": MappingProxyType({}),
        "T=1": MappingProxyType({"temperature": 1.0}),
        "T=1, top-p, penalties": MappingProxyType(
            {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2}
        ),
    }
)
"""How replies are sampled: fields of `SamplingParams`. The first is greedy."""
TRIES = 3
"""Runs over the prompts, until one takes no more graphs, whose time belongs to no cycle."""
WARM_UP = 32
"""Tokens of the replies before those that count."""


class Rows:
    """Makes rows, and keeps what plain decoding told for those that follow.

    Attributes:
        limit, prompts: the device's, and token ids. cost: of passes alone. model, widen, config, device: of the target.
    """

    cost: PassCost

    def __init__(
        self, limit: Bandwidth, prompts: list[tuple[int, ...]], max_tokens: int, config: Any, target: Target
    ) -> None:
        self.limit, self.prompts = limit, prompts
        self.model, self.widen, self.config, self.device = config.model, config.widen, target.config, target.device
        self._max_tokens = max_tokens
        self._figures: dict[tuple[str, int], Decoding] = {}
        self._replies: dict[tuple[str, int], list[list[int]]] = {}

    def decode(self, engine: Engine, drafter: str, law: str, params: SamplingParams, together: int) -> dict[str, Any]:
        """All prompts, so many at a time, as the engine runs them: in flight where that can be, else in lockstep."""
        found, replies = self._flown(engine, params, together) or self._in_lockstep(engine, params, together)
        row = {"drafter": drafter, "law": law, "together": together, "synthetic": None, **asdict(found)}
        key = law, together
        if drafter == PLAIN:
            self._figures[key], self._replies[key] = found, replies
            return {**row, "share_of_limit": self._share(engine.target, found, together)}
        differing = sum(a != b for a, b in zip(replies, self._replies[key], strict=True))
        return {**row, "differing_texts": differing, **self._against(found, key), **self._drafting(engine, found)}

    def shape(self, engine: Engine, law: str, depth: int, width: int) -> dict[str, Any]:
        """A cycle in flight of one shape; a row that says why where there is none."""
        longest, params = max(self.prompts, key=len), SamplingParams(seed=0, ignore_eos=True, **LAWS[law])
        try:
            return dict(measure_shape(engine, [longest], params, depth, width))
        except ConfigError as error:
            return {"error": str(error)}

    def invent(self, engine: Engine, drafter: str, tau: float, depth: int, width: int, together: int) -> dict[str, Any]:
        """With synthetic acceptance: only times are true."""
        shape, alone = {"depth": depth, "width": width}, self._alone(together)
        found = measure_synthetic(engine, self.prompts, tau, self._max_tokens, **shape, together=together, alone=alone)
        row = {"drafter": drafter, "law": GREEDY, "together": together, "synthetic": NOT_VALID, **asdict(found)}
        return {**row, **self._against(found, (GREEDY, together)), **self._drafting(engine, found)}

    def _flown(self, engine: Engine, params: SamplingParams, together: int) -> tuple[Decoding, list[list[int]]] | None:
        """None where most cycles do not fly."""
        if engine.pipeline is None:
            return None
        log, first = Log(engine), self.prompts[:together]
        answer(engine, first, replace(params, max_tokens=min(WARM_UP, self._max_tokens)), together, log.note)
        if not any(cycle.outline for cycle in log.cycles()):
            return None
        for _ in range(TRIES):
            captured = engine.pipeline.num_captured
            replies = [request.output for request in answer(engine, self.prompts, params, together, log.note)]
            cycles = log.cycles()
            if engine.pipeline.num_captured == captured:
                break
        if not flies(cycles, len(first)):
            return None
        return decoding(engine, first, params, cycles), replies

    def _in_lockstep(self, engine: Engine, params: SamplingParams, together: int) -> tuple[Decoding, list[list[int]]]:
        timed = TimedEngine(engine)
        answer(timed, self.prompts[:together], replace(params, max_tokens=min(WARM_UP, self._max_tokens)), together)
        timed.cycles()  # graphs are captured, caches filled
        replies = [request.output for request in answer(timed, self.prompts, params, together)]
        return Decoding.of(timed.cycles(), self._alone(together)), replies

    def _against(self, found: Decoding, key: tuple[str, int]) -> dict[str, Any]:
        """The ratio to plain decoding, and the ratio if nothing but a cycle's parts took time: the target's passes as
        long as they do alone, or in flight all of the cycle as long as it takes the device."""
        plain = self._figures.get(key)
        ratio = None if plain is None else found.tokens_per_second / plain.tokens_per_second
        if plain is None or ratio is None or found.alone is None:
            return {"ratio": ratio, "bound": None, "share_of_bound": None}
        least = found.alone + found.draft + found.rest if found.device is None else found.device
        bound = found.tau * plain.cycle / least
        return {"ratio": ratio, "bound": bound, "share_of_bound": ratio / bound}

    def _alone(self, together: int) -> Callable[[int], float] | None:
        """Seconds of a pass by its rows, for one request; how several share their rows differs from pass to pass."""
        return self.cost.seconds if together == 1 else None

    def _drafting(self, engine: Engine, found: Decoding) -> dict[str, Any]:
        """A level of drafting, and how near it comes to reading the drafter's own weights once."""
        nbytes = engine.drafter.nbytes if engine.drafter else 0
        level = found.draft / found.levels if found.levels else None
        least = nbytes / self.limit.bytes_per_second
        return {"drafter_bytes": nbytes, "level": level, "level_share_of_limit": least / level if level else None}

    def _share(self, target: Target, found: Decoding, together: int) -> float:
        """Of the read limit: the bytes of a plain cycle, keys at the middle of a reply included."""
        middle = sum(map(len, self.prompts)) // len(self.prompts) + self._max_tokens // 2
        nbytes = streamed_bytes(target, together) + together * key_bytes(target, middle)
        return nbytes / self.limit.bytes_per_second / found.cycle
