"""One run on one device: read limit, passes, drafts and the rest of a cycle, plain and speculative, beside peers."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from outrider.control.cost import PassCost
from outrider.engine.memory import free_memory
from outrider.errors import ConfigError, OutriderError
from outrider.measure.bandwidth import Bandwidth, measure_bandwidth
from outrider.measure.cycle import Decoding, TimedEngine, answer
from outrider.measure.passes import key_bytes, measure_passes, streamed_bytes
from outrider.measure.peers import Peer, transformers_peers, vllm_peer
from outrider.measure.synthetic import NOT_VALID, measure_synthetic
from outrider.measure.twin import Likeness, compare
from outrider.request import SamplingParams

PLAIN = "none"
"""No drafter."""
VLLM_HEAD = '{"method": "eagle3", "rejection_sample_method": "synthetic"}'
"""vLLM's own words for a head of the kind whose bytes ours are compared with, and for acceptance by a given mean."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What is measured.

    Attributes:
        drafters: names. prompts: texts, messages or token ids. temperatures: of the decoding runs. together: numbers of
            prompts that run at once. max_tokens: of every reply.
        context: known tokens before a measured pass. widths: rows of one request's pass; batches: requests of one row
            each. repeats: of a pass. buffer: bytes read to find the limit.
        tau: wanted of synthetic runs, at `depth` levels; None leaves them out. peers: run other engines, too;
            vllm: more keywords for vLLM's `LLM`.
    """

    drafters: Sequence[str]
    prompts: Sequence[Any]
    temperatures: Sequence[float] = (0.0, 1.0)
    together: Sequence[int] = (1,)
    max_tokens: int = 128
    context: int = 1024
    widths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    batches: Sequence[int] = (2, 4, 8, 16, 32, 64)
    repeats: int = 10
    tau: float | None = 4.0
    depth: int = 5
    peers: bool = True
    vllm: Mapping[str, Any] = field(default_factory=dict)
    buffer: int | None = None

    def params(self, temperature: float) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=0, ignore_eos=True)


Open = Callable[[Mapping[str, Any]], Any]
"""Keywords of `EngineConfig` to an `LLM`."""
Progress = Callable[[str], None]


@dataclass(slots=True)
class _Plain:
    """What the other runs are held against, by (temperature, prompts at once)."""

    figures: dict[tuple[float, int], Decoding]
    replies: dict[tuple[float, int], list[list[int]]]


class Reporter:
    """Measures one part after the other; only one engine is held at a time.

    Args:
        open_llm: opens the model with these settings. progress: told what is measured now.
    """

    def __init__(self, open_llm: Open, scope: Scope, progress: Progress = lambda text: None) -> None:
        self._open_llm = open_llm
        self._scope = scope
        self._progress = progress
        self._limit = Bandwidth(1.0, 0, "")
        self._plain = _Plain({}, {})
        self._prompts: list[tuple[int, ...]] = []
        self._cost = PassCost({1: 1.0})

    def run(self) -> dict[str, Any]:
        """The report as plain data (JSON).

        Raises:
            OutriderError: where plain decoding cannot be measured; what a drafter or a peer lacks is told in its row.
        """
        report = self._basics()
        report["speculative"] = [row for name in self._scope.drafters for row in self._speculative(name)]
        report["peers"] = [peer.to_json() for peer in self._peers()] if self._scope.peers else []
        if report["twin"] is not None:
            report["twin"] = {**report["twin"], **asdict(self._likeness())}
        return report

    def _basics(self) -> dict[str, Any]:
        """The device, its limit, passes and plain decoding."""
        scope = self._scope
        with self._opened(PLAIN) as llm:
            target, device = llm.engine.target, llm.engine.target.device
            self._prompts = self._encoded(llm)
            self._progress("the read limit")
            self._limit = measure_bandwidth(device, scope.buffer)
            self._progress("passes")
            shapes = [*((1, rows) for rows in scope.widths), *((requests, 1) for requests in scope.batches)]
            passes, notes = measure_passes(target, shapes, scope.context, scope.repeats)
            self._cost = PassCost({p.rows: p.seconds for p in passes if p.requests == 1})
            plain = [
                self._decode(llm, PLAIN, heat, together) for heat in scope.temperatures for together in scope.together
            ]
            original = target.original
            return {
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
                "resolved": llm.describe(),
                "limit": asdict(self._limit),
                "context": scope.context,
                "streamed_bytes": streamed_bytes(target),
                "passes": [{**asdict(p), "share_of_limit": p.share(self._limit.bytes_per_second)} for p in passes],
                "plain": plain,
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
                for heat in scope.temperatures:
                    for together in scope.together:
                        yield self._decode(llm, drafter, heat, together)
                if scope.tau is not None and llm.engine.drafter is not None and llm.engine.drafter.nbytes:
                    for together in scope.together:
                        yield self._invent(llm, drafter, scope.tau, together)
        except OutriderError as error:
            yield {"drafter": drafter, "error": str(error)}

    def _decode(self, llm: Any, drafter: str, heat: float, together: int) -> dict[str, Any]:
        scope, key = self._scope, (heat, together)
        self._progress(f"{drafter} at temperature {heat:g}, {together} at once")
        engine, params = TimedEngine(llm.engine), scope.params(heat)
        answer(engine, self._prompts[:together], replace(params, max_tokens=min(32, scope.max_tokens)), together)
        engine.cycles()  # graphs are captured, caches filled
        replies = [request.output for request in answer(engine, self._prompts, params, together)]
        found = Decoding.of(engine.cycles(), self._alone(together))
        row = {"drafter": drafter, "temperature": heat, "together": together, "synthetic": None, **asdict(found)}
        if drafter == PLAIN:
            self._plain.figures[key], self._plain.replies[key] = found, replies
            return {**row, "share_of_limit": self._share(llm.engine.target, found, together)}
        differing = sum(a != b for a, b in zip(replies, self._plain.replies[key], strict=True))
        return {**row, "differing_texts": differing, **self._against(found, key), **self._drafting(llm, found)}

    def _invent(self, llm: Any, drafter: str, tau: float, together: int) -> dict[str, Any]:
        scope = self._scope
        self._progress(f"{drafter}, {NOT_VALID}, {together} at once")
        found = measure_synthetic(
            llm.engine,
            self._prompts,
            tau,
            scope.max_tokens,
            depth=scope.depth,
            together=together,
            alone=self._alone(together),
        )
        row = {"drafter": drafter, "temperature": 0.0, "together": together, "synthetic": NOT_VALID, **asdict(found)}
        return {**row, **self._against(found, (0.0, together)), **self._drafting(llm, found)}

    def _against(self, found: Decoding, key: tuple[float, int]) -> dict[str, Any]:
        """The ratio to plain decoding, and the ratio if the target's passes took as long as they do alone."""
        plain = self._plain.figures.get(key)
        if plain is None:
            return {"ratio": None, "bound": None, "share_of_bound": None}
        ratio = found.tokens_per_second / plain.tokens_per_second
        if found.alone is None:
            return {"ratio": ratio, "bound": None, "share_of_bound": None}
        bound = found.tau * plain.cycle / (found.alone + found.draft + found.rest)
        return {"ratio": ratio, "bound": bound, "share_of_bound": ratio / bound}

    def _alone(self, together: int) -> Callable[[int], float] | None:
        """Seconds of a pass by its rows, for one request; how several share their rows differs from pass to pass."""
        return self._cost.seconds if together == 1 else None

    def _drafting(self, llm: Any, found: Decoding) -> dict[str, Any]:
        """A level of drafting, and how near it comes to reading the drafter's own weights once."""
        nbytes = llm.engine.drafter.nbytes if llm.engine.drafter else 0
        level = found.draft / found.levels if found.levels else None
        least = nbytes / self._limit.bytes_per_second
        return {"drafter_bytes": nbytes, "level": level, "level_share_of_limit": least / level if level else None}

    def _share(self, target: Any, found: Decoding, together: int) -> float:
        """Of the read limit: the bytes of a plain cycle, keys at the middle of a reply included."""
        prompts = self._prompts
        middle = sum(map(len, prompts)) // len(prompts) + self._scope.max_tokens // 2
        nbytes = streamed_bytes(target) + together * key_bytes(target, middle)
        return nbytes / self._limit.bytes_per_second / found.cycle

    def _likeness(self) -> Likeness:
        """The twin's texts against its original's, in the same arithmetic."""
        self._progress("the twin against its original")
        settings = {"drafter": PLAIN, "prefix_cache": False}
        return compare(
            lambda: self._open_llm({**settings, "widen": None}),
            lambda: self._open_llm(settings),
            self._prompts,
            self._scope.temperatures,
            self._scope.max_tokens,
        )

    def _peers(self) -> Iterator[Peer]:
        """Other engines; each has the device for itself."""
        scope = self._scope
        with self._opened(PLAIN) as llm:
            config, device = llm.engine.target.config, llm.engine.target.device
            widen, name = llm.config.widen, llm.config.model
        del llm
        _free()
        module = _module(name, widen, device)
        yield from transformers_peers(module, self._prompts, scope.max_tokens, self._progress)
        del module
        _free()
        if device.type != "cuda":
            return
        total = torch.cuda.get_device_properties(device).total_memory
        share = 0.9 * free_memory(device) / total
        shape = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        head = {
            **shape,
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": min(32_000, config.vocab_size),
        }
        guess = {
            **json.loads(VLLM_HEAD),
            "num_speculative_tokens": scope.depth,
            "synthetic_acceptance_length": scope.tau,
        }
        for together in scope.together:
            for label, spoken, draft in (("plain", None, None), (f"synthetic tau {scope.tau}", guess, head)):
                if spoken is None or scope.tau is not None:
                    title = f"vLLM, {label}, {together} at once"
                    self._progress(title)
                    asked = self._prompts, scope.max_tokens, together
                    yield vllm_peer(title, shape, *asked, spoken, draft, share, scope.vllm)

    @contextmanager
    def _opened(self, drafter: str) -> Iterator[Any]:
        self._progress(f"loading, drafter {drafter}")
        _free()
        llm = self._open_llm({"drafter": drafter, "prefix_cache": False})
        try:
            yield llm
        finally:
            llm.close()


def _module(name: str, widen: str | None, device: torch.device) -> Any:
    """The same weights as a module of Transformers."""
    from outrider.models.loader import causal_module
    from outrider.models.twin import twin_module, widening_of

    module = causal_module(name, str(device))
    return module if widen is None else twin_module(module, widening_of(module, widen))


def _free() -> None:
    """Give memory of engines that are gone back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
