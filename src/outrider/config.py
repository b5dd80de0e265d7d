"""What can be set: one frozen dataclass; unknown keys refuse and name the nearest known one."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.registry import DRAFTERS, nearest, unknown

DTYPES = ("auto", "float32", "bfloat16", "int8", "packed")
ACCEPTANCE = ("match", "rejection")
OBJECTIVES = ("throughput", "latency", "goodput")
KERNELS = ("auto", "native", "triton", "plain")
WIDENINGS = ("8b", "2x")
"""Plans by which `models/widen` enlarges a model."""
MOST_THREADS = 1024
KINDS = {"str": "a text", "int": "a whole number", "bool": "True or False", "float": "a number such as 0.5"}
"""What to give for a field of a type."""


def cache_folder() -> Path:
    """Where fetched models and built kernels are kept: `OUTRIDER_CACHE`, else `~/.cache/outrider`."""
    return Path(os.environ.get("OUTRIDER_CACHE") or Path.home() / ".cache" / "outrider")


def refuse_less(settings: object, what: str, **least: float) -> None:
    """Refuse settings that are below their bounds, or no number at all; None is of no bound.

    Args:
        what: what to give, in words. least: the bound of each, by its name.

    Raises:
        ConfigError: naming the first of them.
    """
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"{name}={value!r} is out of range: give {what} of at least {bound}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that shapes an engine; "auto" values are decided once by `engine/resolve`.

    Attributes:
        model: alias, folder, `.gguf` file or hub id of the target.
        drafter: a name of the registry, two joined by "+" (a cascade: the second guesses where the first is silent),
            "auto" or "none" (plain decoding). drafter_model: folder or alias of the drafter's own weights.
        dtype: "float32", "bfloat16", "int8" (on a GPU: weights of 8 bits with one scale an output, beside bfloat16),
            "packed" (a quantised file's own bits), or "auto".
        device: "cpu", "cuda", "cuda:1", ... or "auto". threads: CPU threads of the kernels (None: all).
        depth: most levels of a draft tree, None leaves it to control. width: most children of one node
            (None: the drafter's own, 1 for a chain). nodes: most nodes of a tree (None: depth times width).
        share_history: guesses may come from earlier replies of the engine, whoever asked; no text depends on it.
        exit_layers: layers that `early_exit` runs (None: a third of the target's).
        adaptive: control may choose any depth from 0 to `depth`; False drafts `depth` levels always.
        objective: what it chooses by: "throughput" (tokens a second of all requests), "latency" (seconds a token in
            the mean over requests) or "goodput" (tokens that come at the `pace`). pace: tokens a second that each
            request should get, for "goodput".
        acceptance: "match" (same seed, same text) or "rejection" (same law).
        max_context: most positions of one request (None: the model's own). max_requests: most that run at once.
        max_rows: most rows of one pass. num_slots: key-value slots (None: planned from memory).
        memory_share: of a GPU's memory, the part that may be in use once the engine is full (None: 0.9); of a CPU's,
            the part of what is free at start that the engine may take beside its weights (None: 0.25).
        block_size: slots a block. prefix_cache: reuse blocks of equal prefixes.
        kernels: "auto", "native" (CPU), "triton" (GPU) or "plain". pass_width: rows of every pass of a Transformers
            module, narrower ones being padded (None: 16); a wide one suits many requests.
        in_flight: cycles that may be on the device at once where no request needs its tokens on the host (None: 2 on a
            GPU, 0 on a CPU); 0 reads every cycle before the next begins.
        self_test: bit-compare the rows of every kernel at load.
        tensor_parallel: processes that share the target, each a part of every layer, on a GPU each; `torchrun` starts
            them.
        widen: for measuring, serve the model enlarged to this shape by parts that change nothing of what it says, and
            its drafter likewise: "8b" (Llama 3.1 8B) or "2x".
    """

    model: str
    drafter: str = "auto"
    drafter_model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    depth: int | None = None
    width: int | None = None
    nodes: int | None = None
    share_history: bool = False
    exit_layers: int | None = None
    adaptive: bool = True
    objective: str = "throughput"
    pace: float | None = None
    acceptance: str = "match"
    max_context: int | None = None
    max_requests: int = 64
    max_rows: int = 512
    num_slots: int | None = None
    memory_share: float | None = None
    block_size: int = 16
    prefix_cache: bool = True
    kernels: str = "auto"
    pass_width: int | None = None
    in_flight: int | None = None
    self_test: bool = True
    tensor_parallel: int = 1
    widen: str | None = None

    def __post_init__(self) -> None:
        def choose(name: str, choices: tuple[str, ...]) -> None:
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name}={value!r} is unknown: {nearest(str(value), list(choices))}")

        choose("dtype", DTYPES)
        choose("acceptance", ACCEPTANCE)
        choose("objective", OBJECTIVES)
        choose("kernels", KERNELS)
        if self.widen is not None:
            choose("widen", WIDENINGS)
        if self.drafter not in ("auto", "none") and isinstance(self.drafter, str):
            parts = self.drafter.split("+")
            problem = unknown("drafter", parts, list(DRAFTERS))
            if problem or len(parts) > 2 or len(set(parts)) < len(parts):
                problem = problem or "a cascade joins two different ones: name two, the cheap one first"
                raise ConfigError(f"drafter={self.drafter!r}: {problem}")
        for name in ("model", "drafter_model"):
            if isinstance(getattr(self, name), Path):
                object.__setattr__(self, name, str(getattr(self, name)))
        for entry in fields(self):
            kind, _, optional = str(entry.type).partition(" | ")
            value = getattr(self, entry.name)
            if kind == "float" and type(value) is int:
                object.__setattr__(self, entry.name, float(value))
                continue
            if type(value).__name__ != kind and not (optional and value is None):
                raise ConfigError(f"{entry.name}={value!r} is of the wrong kind: give {KINDS[kind]}")
        refuse_less(
            self,
            "a whole number",
            width=1,
            max_requests=1,
            max_rows=1,
            block_size=1,
            nodes=1,
            depth=0,
            exit_layers=1,
            max_context=2,
            num_slots=1,
            threads=1,
            pass_width=1,
            in_flight=0,
            tensor_parallel=1,
        )
        if (self.pace is not None) != (self.objective == "goodput"):
            raise ConfigError("pace belongs to objective='goodput', and that to a pace: give both, or neither")
        if self.pace is not None and not 0 < self.pace < math.inf:
            raise ConfigError(f"pace={self.pace!r} is out of range: give tokens a second, above 0")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share={self.memory_share!r} is out of range: give a share above 0, up to 1")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(f"threads={self.threads} is out of range: give at most {MOST_THREADS}")

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """Build from keywords; an unknown one is refused with the nearest known name.

        Raises:
            ConfigError: for an unknown key or a value out of range.
        """
        problem = unknown("setting", settings, [f.name for f in fields(cls)])
        if problem:
            raise ConfigError(problem)
        return cls(**settings)
