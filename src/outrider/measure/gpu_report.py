"""One run on one device: read limit, passes, drafts and the rest of a cycle, plain and speculative, beside peers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from outrider.control.cost import PassCost
from outrider.engine.step import Engine
from outrider.errors import CapacityError, ConfigError, OutriderError
from outrider.measure.bandwidth import measure_bandwidth
from outrider.measure.passes import measure_passes, streamed_bytes
from outrider.measure.peers import Peer, transformers_peers, twin_or_module
from outrider.measure.random_rows import RandomModel, measure_random
from outrider.measure.report_rows import LAWS, PLAIN, Rows
from outrider.measure.start import Start
from outrider.measure.synthetic import NOT_VALID
from outrider.measure.twin import Likeness, compare
from outrider.measure.vllm_peer import VllmWork, vllm_peers
from outrider.request import SamplingParams

PARTS = ("passes", "speculative", "shapes", "synthetic", "twin", "random", "starts", "peers")
"""Of a report, in their order but for the shapes and the synthetic runs, which stand beside their drafter's rows."""
FIRST_WIDTHS = (1, 16, 64)
"""Rows of the passes that are measured before all others: a run that is stopped has what the bars ask for."""
SHAPES = ((5, 1), (8, 8))
"""Levels and siblings of the trees whose cycles in flight are timed by themselves: a chain, and up to 64 nodes."""


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
        only: names of `PARTS`; what plain decoding and the first passes take is measured always.
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
    only: Sequence[str] = PARTS

    def params(self, law: str) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, seed=0, ignore_eos=True, **LAWS[law])


Open = Callable[[Mapping[str, Any]], Any]
"""Keywords of `EngineConfig` to an `LLM`."""
Progress = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]


class Reporter:
    """Measures one part after the other, what the bars ask for first; only one engine is held at a time.

    Args:
        open_llm: opens the model with these settings. start: measures what a start takes; no engine is held then.
        progress: told what is measured now. save: given the report as far as it is, after every row.
    """

    _rows: Rows

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
        self._report: dict[str, Any] = {
            name: [] for name in ("passes", "plain", "speculative", "shapes", "random", "starts", "peers", "elapsed")
        }

    def run(self) -> dict[str, Any]:
        """The report as plain data (JSON).

        Raises:
            OutriderError: where plain decoding cannot be measured; what a drafter or a peer lacks is told in its row.
        """
        report, asked = self._report, self._scope.only
        self._basics()
        if {"speculative", "shapes", "synthetic"} & set(asked):
            for name in self._scope.drafters:
                self._speculative(name)
        if report["twin"] is not None and "twin" in asked:
            with self._part("the twin against its original"):
                report["twin"] |= asdict(self._likeness())
        for name, model in self._scope.random.items() if "random" in asked else ():
            _free()
            rows = self._rows
            with self._part(f"random weights: {name}"):
                given = rows.device, rows.limit.bytes_per_second, self._scope.max_tokens, self._scope.repeats
                report["random"] += measure_random({name: model}, *given)
        if "starts" in asked:
            _free()
            with self._part("starts"):
                report["starts"] += [asdict(start) for start in self._start()]
        if self._scope.peers and "peers" in asked:
            with self._part("peers"):
                for peer in self._peers():
                    report["peers"].append(peer.to_json())
                    self._save(report)
        return report

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Something that is measured: told before, saved after with the seconds that it took."""
        self._progress(name)
        started = time.perf_counter()
        yield
        self._report["elapsed"].append({"part": name, "seconds": time.perf_counter() - started})
        if self._report["passes"]:
            self._save(self._report)

    def _basics(self) -> None:
        """The device, its limit, passes and plain decoding."""
        scope = self._scope
        with self._opened(PLAIN) as llm:
            target, engine = llm.engine.target, llm.engine
            prompts, device, original = self._encoded(llm), target.device, target.original
            with self._part("the read limit"):
                limit = measure_bandwidth(device, scope.buffer)
                self._report |= {
                    "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
                    "resolved": llm.describe(),
                    "limit": asdict(limit),
                    "context": scope.context,
                    "streamed_bytes": streamed_bytes(target),
                    "notes": [],
                    "twin": None if original is None else {"original": original.name, "plan": original.plan},
                }
                self._rows = Rows(limit, prompts, scope.max_tokens, llm.config, target)
            shapes = [*((1, rows) for rows in scope.widths), *((requests, 1) for requests in scope.batches)]
            first = [shape for shape in shapes if shape[0] == 1 and shape[1] in FIRST_WIDTHS] or shapes[:1]
            self._passes(engine, first)
            for law in scope.laws[:1]:
                self._decoding(llm, PLAIN, law)
            others = [shape for shape in shapes if shape not in first]
            if others and "passes" in scope.only:
                self._passes(engine, others)
            for law in scope.laws[1:]:
                self._decoding(llm, PLAIN, law)

    def _passes(self, engine: Engine, shapes: Sequence[tuple[int, int]]) -> None:
        scope, rows, report = self._scope, self._rows, self._report
        with self._part(f"passes, {len(shapes)} shapes"):
            try:
                passes, notes = measure_passes(engine.target, shapes, scope.context, scope.repeats, engine.pages)
            except CapacityError as error:
                if not report["passes"]:
                    raise
                passes, notes = [], [str(error)]
            rate = rows.limit.bytes_per_second
            report["passes"] += [{**asdict(p), "share_of_limit": p.share(rate)} for p in passes]
            report["passes"].sort(key=lambda p: (p["requests"], p["rows"]))
            report["notes"] += notes
            rows.cost = PassCost({p["rows"]: p["seconds"] for p in report["passes"] if p["requests"] == 1})

    def _decoding(self, llm: Any, drafter: str, law: str) -> None:
        """Rows of one law, plain or speculative."""
        for together in self._scope.together:
            with self._part(f"{drafter}, {law}, {together} at once"):
                row = self._rows.decode(llm.engine, drafter, law, self._scope.params(law), together)
                self._report["plain" if drafter == PLAIN else "speculative"].append(row)

    def _encoded(self, llm: Any) -> list[tuple[int, ...]]:
        prompts = [llm.encode(prompt) for prompt in self._scope.prompts]
        longest = max(map(len, prompts), default=0)
        if not 0 < longest <= llm.resolved.max_context - self._scope.max_tokens:
            raise ConfigError(
                f"the longest prompt has {longest} tokens and the context holds {llm.resolved.max_context}, with a "
                f"reply of {self._scope.max_tokens}: give prompts that fit"
            )
        return prompts

    def _speculative(self, drafter: str) -> None:
        """Rows of one drafter: greedy as control uses it, shapes of cycles, synthetic acceptance, then other laws; one
        row that says why where it cannot be built."""
        scope = self._scope
        try:
            with self._opened(drafter) as llm:
                engine = llm.engine
                for law in scope.laws[:1] if "speculative" in scope.only else ():
                    self._decoding(llm, drafter, law)
                if "shapes" in scope.only and engine.pipeline is not None:
                    self._shapes(engine, drafter)
                if "synthetic" in scope.only and scope.tau is not None and engine.drafter and engine.drafter.nbytes:
                    for together in scope.together:
                        with self._part(f"{drafter}, {NOT_VALID}, {together} at once"):
                            shape = scope.tau, scope.depth, scope.width
                            self._report["speculative"].append(self._rows.invent(engine, drafter, *shape, together))
                for law in scope.laws[1:] if "speculative" in scope.only else ():
                    self._decoding(llm, drafter, law)
        except OutriderError as error:
            self._report["speculative"].append({"drafter": drafter, "error": str(error)})
            self._save(self._report)

    def _shapes(self, engine: Engine, drafter: str) -> None:
        """Cycles in flight of a fixed shape, under the laws that fly."""
        for law in (law for law in self._scope.laws if set(LAWS[law]) <= {"temperature"}):
            for depth, width in SHAPES:
                with self._part(f"{drafter}, {law}, {depth} levels of {width}"):
                    row = self._rows.shape(engine, law, depth, width)
                    self._report["shapes"].append({"drafter": drafter, "law": law, **row})

    def _likeness(self) -> Likeness:
        """The twin's texts against its original's, in the same arithmetic."""
        settings = {"drafter": PLAIN, "prefix_cache": False}
        _free()
        return compare(
            lambda: self._open_llm({**settings, "widen": None}),
            lambda: self._open_llm(settings),
            self._rows.prompts,
            [self._scope.params(law) for law in self._scope.laws],
        )

    def _peers(self) -> Iterator[Peer]:
        """Other engines; each has the device for itself."""
        scope, rows = self._scope, self._rows
        _free()
        if rows.device.type == "cuda":
            work = VllmWork(rows.config, rows.prompts, scope.max_tokens, scope.tau, scope.depth, scope.vllm)
            yield from vllm_peers(work, scope.together, rows.device, self._progress)
        module = twin_or_module(rows.model, rows.widen, rows.device)
        yield from transformers_peers(module, rows.prompts, scope.max_tokens, self._progress)

    @contextmanager
    def _opened(self, drafter: str) -> Iterator[Any]:
        _free()
        with self._part(f"loading, drafter {drafter}"):
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
