"""Other engines on the same device, prompts and weights: Transformers in this process, vLLM in one of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from outrider.measure.cycle import wait

LOOKUP = 5
"""Tokens a guess of Transformers' prompt lookup."""
PATIENCE = 900.0
"""Seconds that another process may take, its start included."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine's figure: tokens per second over all prompts, prompts read included; or why there is none."""

    name: str
    tokens_per_second: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def transformers_peers(
    module: Any, prompts: Sequence[tuple[int, ...]], max_tokens: int, progress: Callable[[str], None]
) -> list[Peer]:
    """Greedy `generate`, one prompt at a time: plain, with prompt lookup, and with a static cache that is compiled.

    Every reply has exactly `max_tokens` tokens. The first prompt is answered once before, which compiles.
    """
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        f"prompt lookup {LOOKUP}": {"prompt_lookup_num_tokens": LOOKUP},
        "static cache, torch.compile": {"cache_implementation": "static"},
    }
    return [_transformers(f"Transformers, {way}", module, prompts, max_tokens, k, progress) for way, k in ways.items()]


def _transformers(
    name: str,
    module: Any,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    keywords: dict[str, Any],
    progress: Callable[[str], None],
) -> Peer:
    progress(name)

    def run(prompt: tuple[int, ...]) -> int:
        ids = torch.tensor([prompt], device=module.device)
        out = module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **keywords,
        )
        return int(out.shape[1] - ids.shape[1])

    try:
        run(prompts[0])
        wait(module.device)
        started = time.perf_counter()
        tokens = sum(run(prompt) for prompt in prompts)
        wait(module.device)
    except Exception as error:  # whatever a compiler or a cache of theirs raises is told in the report
        return Peer(name, error=_first_line(error))
    seconds = time.perf_counter() - started
    return Peer(name, tokens / seconds, tokens, seconds)


def vllm_peer(
    name: str,
    config: dict[str, Any],
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    together: int,
    speculative: dict[str, Any] | None,
    draft_config: dict[str, Any] | None,
    share: float,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Peer:
    """vLLM on random weights of the same shape, in a process of its own; no figure where it is not installed.

    Args:
        config: of the model, as Transformers writes it. together: prompts at a time.
        speculative: its `speculative_config` without "model"; draft_config: of that head's own model.
        share: of the device's memory that it may take. options: more keywords for its `LLM`.
    """
    if importlib.util.find_spec("vllm") is None:
        return Peer(name, error="vLLM is not installed here")
    with tempfile.TemporaryDirectory() as room:
        folder, draft = Path(room) / "model", Path(room) / "draft"
        for place, content in ((folder, config), (draft, draft_config)):
            if content is not None:
                place.mkdir()
                (place / "config.json").write_text(json.dumps(content))
        spoken = None if speculative is None else {**speculative, "model": str(draft)} if draft_config else speculative
        job = {
            "model": str(folder),
            "prompts": [list(prompt) for prompt in prompts],
            "max_tokens": max_tokens,
            "together": together,
            "speculative": spoken,
            "share": share,
            "options": dict(options),
        }
        file = Path(room) / "job.json"
        file.write_text(json.dumps(job))
        return _child(name, file)


def _child(name: str, file: Path) -> Peer:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
    }
    command = [sys.executable, "-m", "outrider.measure.vllm_run", str(file)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
        found = json.loads(file.with_suffix(".out").read_text())
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or "").strip().splitlines() if "Error" in line] or ["it died"]
        return Peer(name, error=lines[-1][:300])
    except (subprocess.TimeoutExpired, OSError, ValueError) as error:
        return Peer(name, error=_first_line(error))
    assert done.returncode == 0
    return Peer(name, found["tokens"] / found["seconds"], found["tokens"], found["seconds"])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
