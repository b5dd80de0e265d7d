"""vLLM on the same device and prompts, with random weights of the same shape, each time in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.measure.child import ChildError, run_child
from outrider.measure.peers import Peer
from outrider.models.device_memory import free_memory

HEAD = '{"method": "eagle3", "rejection_sample_method": "synthetic"}'
"""vLLM's own words for a head of the kind whose bytes ours are compared with, and for acceptance by a given mean."""
HEAD_WORDS = 32_000
"""Of that head's own vocabulary."""
SHARE = 0.9
"""Of the free memory that it may take."""


@dataclass(frozen=True, slots=True)
class VllmWork:
    """What vLLM is asked.

    Attributes:
        config: the model's, of Transformers. prompts: token ids. tau: mean of the runs with an EAGLE-3-shaped head that
            guesses `depth` tokens and is accepted at random (output not valid); None leaves them out.
        options: more keywords for its `LLM`.
    """

    config: Any
    prompts: Sequence[tuple[int, ...]]
    max_tokens: int
    tau: float | None
    depth: int
    options: Mapping[str, Any]

    def configs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the model and of the head."""
        model = {**self.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        head = {
            **model,
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": min(HEAD_WORDS, self.config.vocab_size),
        }
        return model, head

    def job(self, room: Path, together: int, is_plain: bool, share: float) -> dict[str, Any]:
        """Written into `room` with the folders that it names; see `vllm_run`."""
        for name, content in zip(("model", "head"), self.configs(), strict=True):
            (room / name).mkdir()
            (room / name / "config.json").write_text(json.dumps(content))
        guess = {
            **json.loads(HEAD),
            "model": str(room / "head"),
            "num_speculative_tokens": self.depth,
            "synthetic_acceptance_length": self.tau,
        }
        return {
            "model": str(room / "model"),
            "prompts": [list(prompt) for prompt in self.prompts],
            "max_tokens": self.max_tokens,
            "together": together,
            "speculative": None if is_plain else guess,
            "share": share,
            "options": dict(self.options),
        }


def vllm_peers(
    work: VllmWork, together: Sequence[int], device: torch.device, progress: Callable[[str], None]
) -> Iterator[Peer]:
    """Plain, then with the head, at each number of prompts at once; one row that says so where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        yield Peer("vLLM", error="vLLM is not installed here")
        return
    share = 1.0
    if device.type == "cuda":
        share = SHARE * free_memory(device) / torch.cuda.get_device_properties(device).total_memory
    for count in together:
        for is_plain in (True, False) if work.tau is not None else (True,):
            way = "plain" if is_plain else f"head, synthetic tau {work.tau:g}: output not valid"
            name = f"vLLM, {way}, {count} at once"
            progress(name)
            yield _child(name, partial(work.job, together=count, is_plain=is_plain, share=share))


def _child(name: str, job: Callable[[Path], Mapping[str, Any]]) -> Peer:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
    }
    try:
        found = run_child("vllm_run", job, environment)
    except ChildError as error:
        return Peer(name, error=str(error))
    return Peer.of(name, tuple(found["whole"]), tuple(found["first"]))
