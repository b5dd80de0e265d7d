"""One run on one device: read limit, passes, drafts and the rest of a cycle, plain and speculative, beside peers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from outrider.control.cost import PassCost
from outrider.errors import ConfigError, OutriderError
from outrider.measure.bandwidth import Bandwidth, measure_bandwidth
from outrider.measure.cycle import Decoding, TimedEngine, answer
from outrider.measure.passes import key_bytes, measure_passes, streamed_bytes
from outrider.measure.peers import Peer, transformers_peers, twin_or_module
from outrider.measure.random_rows import RandomModel, measure_random
from outrider.measure.start import Start
from outrider.measure.synthetic import NOT_VALID, measure_synthetic
from outrider.measure.twin import Likeness, compare
from outrider.measure.vllm_peer import VllmWork, vllm_peers
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


@dataclass(frozen=True, slots=True)
class Scope:
    """What is measured.

    Attributes:
        drafters: names. prompts: texts, messages or token ids. laws: names in `LAWS`. together: numbers of prompts that
            run at once. max_tokens: of every reply.
        context: known tokens before a measured pass. widths: rows of one request's pass; batches: requests of one row
            each. repeats: of a pass. buffer: bytes read to find the limit.
        tau: wanted of synthetic runs, with trees of `depth` levels and `width` siblings; None leaves them out.
        peers: run other engines, too; vllm: more keywords for vLLM's `LLM`.
        random: models with random weights, one row each.
    """

    drafters: Sequence[str]
    prompts: Sequence[Any]
    laws: Sequence[str] = tuple(LAWS)
    together: Sequence[int] = (1,)
    max_tokens: int = 128
    context: int = 1024
    widths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    batches: Sequence[int] = (2, 4, 8, 16, 32, 64)
    repeats: int = 10
    buffer: int | None = None
    tau: float | None = 4.0
    depth: int = 5
    width: int = 1
    peers: bool = True
    vllm: Mapping[str, Any] = field(default_factory=dict)
    random: Mapping[str, RandomModel] = field(default_factory=dict)

    def params(self, law: str) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, seed=0, ignore_eos=True, **LAWS[law])


Open = Callable[[Mapping[str, Any]], Any]
"""Keywords of `EngineConfig` to an `LLM`."""
Progress = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class _Known:
    """What plain decoding told, for the runs that follow.

    Attributes:
        limit, prompts: the device's, and token ids. cost: of passes alone. model, widen, config, device: of the target.
        figures, replies: by law and prompts at once.
    """

    limit: Bandwidth
    prompts: list[tuple[int, ...]]
    cost: PassCost
    model: str
    widen: str | None
    config: Any
    device: torch.device
    figures: dict[tuple[str, int], Decoding] = field(default_factory=dict)
    replies: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)


class Reporter:
    """Measures one part after the other; only one engine is held at a time.

    Args:
        open_llm: opens the model with these settings. start: measures what a start takes; no engine is held then.
        progress: told what is measured now. save: given the report as far as it is, after every part.
    """

    _known: _Known

    def __init__(
        self,
        open_llm: Open,
        scope: Scope,
        start: Callable[[], Sequence[Start]] = tuple,
        progress: Progress = lambda text: None,
        save: Save = lambda report: None,
    ) -> None:
        self._open_llm = open_llm
        self._scope = scope
        self._start = start
        self._progress = progress
        self._save = save

    def run(self) -> dict[str, Any]:
        """The report as plain data (JSON).

        Raises:
            OutriderError: where plain decoding cannot be measured; what a drafter or a peer lacks is told in its row.
        """
        _free()
        starts = [asdict(start) for start in self._start()]
        report = {**self._basics(), "starts": starts, "speculative": [], "random": [], "peers": []}
        self._save(report)
        for name in self._scope.drafters:
            report["speculative"] += self._speculative(name)
            self._save(report)
        if report["twin"] is not None:
            report["twin"] |= asdict(self._likeness())
            self._save(report)
        if self._scope.random:
            _free()
            limit, repeats = self._known.limit.bytes_per_second, self._scope.repeats
            rows = measure_random(
                self._scope.random, self._known.device, limit, self._scope.max_tokens, repeats, self._progress
            )
            report["random"] = rows
            self._save(report)
        for peer in self._peers() if self._scope.peers else ():
            report["peers"].append(peer.to_json())
            self._save(report)
        return report

    def _basics(self) -> dict[str, Any]:
        """The device, its limit, passes and plain decoding."""
        scope = self._scope
        with self._opened(PLAIN) as llm:
            target = llm.engine.target
            prompts, device, original = self._encoded(llm), target.device, target.original
            self._progress("the read limit")
            limit = measure_bandwidth(device, scope.buffer)
            self._progress("passes")
            shapes = [*((1, rows) for rows in scope.widths), *((requests, 1) for requests in scope.batches)]
            passes, notes = measure_passes(target, shapes, scope.context, scope.repeats, llm.engine.pages)
            cost = PassCost({p.rows: p.seconds for p in passes if p.requests == 1})
            self._known = _Known(limit, prompts, cost, llm.config.model, llm.config.widen, target.config, device)
            return {
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
                "resolved": llm.describe(),
                "limit": asdict(limit),
                "context": scope.context,
                "streamed_bytes": streamed_bytes(target),
                "passes": [{**asdict(p), "share_of_limit": p.share(limit.bytes_per_second)} for p in passes],
                "plain": [self._decode(llm, PLAIN, law, together) for law in scope.laws for together in scope.together],
                "notes": notes,
                "twin": None if original is None else {"original": original.name, "plan": original.plan},
            }

    def _encoded(self, llm: Any) -> list[tuple[int, ...]]:
        prompts = [llm.encode(prompt) for prompt in self._scope.prompts]
        longest = max(map(len, prompts), default=0)
        if not 0 < longest <= llm.resolved.max_context - self._scope.max_tokens:
            raise ConfigError(
                f"the longest prompt has {longest} tokens and the context holds {llm.resolved.max_context}, with a "
                f"reply of {self._scope.max_tokens}: give prompts that fit"
            )
        return prompts

    def _speculative(self, drafter: str) -> Iterator[dict[str, Any]]:
        """Rows of one drafter: as control uses it, then with synthetic acceptance; one row where it cannot be built."""
        scope = self._scope
        try:
            with self._opened(drafter) as llm:
                for law in scope.laws:
                    for together in scope.together:
                        yield self._decode(llm, drafter, law, together)
                if scope.tau is not None and llm.engine.drafter is not None and llm.engine.drafter.nbytes:
                    for together in scope.together:
                        yield self._invent(llm, drafter, scope.tau, together)
        except OutriderError as error:
            yield {"drafter": drafter, "error": str(error)}

    def _decode(self, llm: Any, drafter: str, law: str, together: int) -> dict[str, Any]:
        scope, known, key = self._scope, self._known, (law, together)
        self._progress(f"{drafter}, {law}, {together} at once")
        engine, params = TimedEngine(llm.engine), scope.params(law)
        answer(engine, known.prompts[:together], replace(params, max_tokens=min(32, scope.max_tokens)), together)
        engine.cycles()  # graphs are captured, caches filled
        replies = [request.output for request in answer(engine, known.prompts, params, together)]
        found = Decoding.of(engine.cycles(), self._alone(together))
        row = {"drafter": drafter, "law": law, "together": together, "synthetic": None, **asdict(found)}
        if drafter == PLAIN:
            known.figures[key], known.replies[key] = found, replies
            return {**row, "share_of_limit": self._share(llm.engine.target, found, together)}
        differing = sum(a != b for a, b in zip(replies, known.replies[key], strict=True))
        return {**row, "differing_texts": differing, **self._against(found, key), **self._drafting(llm, found)}

    def _invent(self, llm: Any, drafter: str, tau: float, together: int) -> dict[str, Any]:
        scope = self._scope
        self._progress(f"{drafter}, {NOT_VALID}, {together} at once")
        found = measure_synthetic(
            llm.engine,
            self._known.prompts,
            tau,
            scope.max_tokens,
            depth=scope.depth,
            width=scope.width,
            together=together,
            alone=self._alone(together),
        )
        row = {"drafter": drafter, "law": GREEDY, "together": together, "synthetic": NOT_VALID, **asdict(found)}
        return {**row, **self._against(found, (GREEDY, together)), **self._drafting(llm, found)}

    def _against(self, found: Decoding, key: tuple[str, int]) -> dict[str, Any]:
        """The ratio to plain decoding, and the ratio if the target's passes took as long as they do alone."""
        plain = self._known.figures.get(key)
        ratio = None if plain is None else found.tokens_per_second / plain.tokens_per_second
        if plain is None or ratio is None or found.alone is None:
            return {"ratio": ratio, "bound": None, "share_of_bound": None}
        bound = found.tau * plain.cycle / (found.alone + found.draft + found.rest)
        return {"ratio": ratio, "bound": bound, "share_of_bound": ratio / bound}

    def _alone(self, together: int) -> Callable[[int], float] | None:
        """Seconds of a pass by its rows, for one request; how several share their rows differs from pass to pass."""
        return self._known.cost.seconds if together == 1 else None

    def _drafting(self, llm: Any, found: Decoding) -> dict[str, Any]:
        """A level of drafting, and how near it comes to reading the drafter's own weights once."""
        nbytes = llm.engine.drafter.nbytes if llm.engine.drafter else 0
        level = found.draft / found.levels if found.levels else None
        least = nbytes / self._known.limit.bytes_per_second
        return {"drafter_bytes": nbytes, "level": level, "level_share_of_limit": least / level if level else None}

    def _share(self, target: Any, found: Decoding, together: int) -> float:
        """Of the read limit: the bytes of a plain cycle, keys at the middle of a reply included."""
        prompts = self._known.prompts
        middle = sum(map(len, prompts)) // len(prompts) + self._scope.max_tokens // 2
        nbytes = streamed_bytes(target, together) + together * key_bytes(target, middle)
        return nbytes / self._known.limit.bytes_per_second / found.cycle

    def _likeness(self) -> Likeness:
        """The twin's texts against its original's, in the same arithmetic."""
        self._progress("the twin against its original")
        settings = {"drafter": PLAIN, "prefix_cache": False}
        _free()
        return compare(
            lambda: self._open_llm({**settings, "widen": None}),
            lambda: self._open_llm(settings),
            self._known.prompts,
            [self._scope.params(law) for law in self._scope.laws],
        )

    def _peers(self) -> Iterator[Peer]:
        """Other engines; each has the device for itself."""
        scope, known = self._scope, self._known
        _free()
        module = twin_or_module(known.model, known.widen, known.device)
        yield from transformers_peers(module, known.prompts, scope.max_tokens, self._progress)
        del module
        _free()
        if known.device.type == "cuda":
            work = VllmWork(known.config, known.prompts, scope.max_tokens, scope.tau, scope.depth, scope.vllm)
            yield from vllm_peers(work, scope.together, known.device, self._progress)

    @contextmanager
    def _opened(self, drafter: str) -> Iterator[Any]:
        self._progress(f"loading, drafter {drafter}")
        _free()
        llm = self._open_llm({"drafter": drafter, "prefix_cache": False})
        try:
            yield llm
        finally:
            llm.close()


def _free() -> None:
    """Give memory of engines that are gone back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
