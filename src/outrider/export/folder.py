"""A drafter written as another engine reads it, and what to tell that engine, by the engine's name."""

from __future__ import annotations

import json
import shlex
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict

from outrider.errors import ModelError
from outrider.export.base import Export, Layout, Subject
from outrider.models import checks
from outrider.models.heads import files, foreign
from outrider.models.heads.files import Artefact
from outrider.models.loader import causal_module, load, locate, true_vocabulary
from outrider.models.target import Original
from outrider.registry import EXPORTED, THERE, nearest

ENGINES = ("vllm", "sglang", "tensorrt-llm")
SHARD_BYTES = 5 * 2**30
GUESSES = 5
"""Tokens a cycle where nobody says, and no block does."""


@dataclass(frozen=True, slots=True)
class Told:
    """What was written, and how the other engine is started with it.

    Attributes:
        engine: one of `ENGINES`. folder: of the drafter. settings: vLLM's `--speculative-config`, SGLang's flags with
            their values, or TensorRT-LLM's YAML as an object. how: a command, or the YAML, as text.
    """

    engine: str
    folder: str
    settings: Mapping[str, Any]
    how: str


def export(drafter: str, target: str, out: Path, engine: str, guesses: int | None, there: str | None) -> Told:
    """Write a trained drafter, or a head of others, for another engine.

    Args:
        drafter: folder or alias. target: as everywhere. guesses: tokens a cycle; None: the block's, or 5.
        there: what the other engine shall call the target; None: as here.

    Raises:
        ModelError: if the drafter is none, is another target's, or does what that engine's layout has no room for.
        OSError: if it cannot be written.
    """
    if engine not in ENGINES:
        raise ModelError(f"unknown engine {engine!r}: {nearest(engine, list(ENGINES))}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} is there already and is not empty: name another folder")
    artefact, subject = _read(files.locate(drafter), target, there)
    if artefact.drafter not in tuple(EXPORTED):
        raise ModelError(f"no other engine drafts as {artefact.drafter} does: export one of {', '.join(EXPORTED)}")
    block = artefact.config.get("block_size")
    made: Export = EXPORTED[artefact.drafter](artefact, subject, guesses or (block - 1 if block else GUESSES))
    layout = {"vllm": made.vllm, "sglang": made.sglang, "tensorrt-llm": made.tensorrt}[engine]()
    told = _told(engine, artefact, subject, str(out), made.guesses)
    _write(out, layout, told, artefact, subject)
    return told


def _read(folder: Path, target: str, there: str | None) -> tuple[Artefact, Subject]:
    """A head of ours is held against the target's config and tokenizer alone, one of others against its weights too."""
    source = locate(target)
    config, tokenizer = checks.read_config(source), checks.read_tokenizer(source)
    vocab_size = true_vocabulary(config, tokenizer)
    if foreign.is_foreign(folder):
        artefact = foreign.load(folder, files.kind(folder), load(target, self_test=False))
    else:
        artefact = files.read(folder)
        text = config.get_text_config(decoder=True)
        sizes = (text.hidden_size, text.num_hidden_layers, vocab_size)
        files.check_target(artefact, Original(source.name, "", config, *sizes, tokenizer))

    def output_rows() -> Any:
        return causal_module(target, "cpu").get_output_embeddings().weight.detach()

    return artefact, Subject(source.name, there or source.name, config, vocab_size, output_rows)


def _told(engine: str, artefact: Artefact, subject: Subject, folder: str, guesses: int) -> Told:
    vllm, sglang, tensorrt = THERE[artefact.drafter]
    target = shlex.quote(subject.there)
    settings: dict[str, Any]
    if engine == "vllm":
        settings = {"method": vllm, "model": folder, "num_speculative_tokens": guesses}
        return Told(
            engine, folder, settings, f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(settings))}"
        )
    if engine == "sglang":
        settings = {
            "--speculative-algorithm": sglang,
            "--speculative-draft-model-path": folder,
            "--speculative-num-steps": guesses,
            "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": guesses + 1,
        }
        flags = " ".join(f"{flag} {shlex.quote(str(value))}" for flag, value in settings.items())
        return Told(engine, folder, settings, f"python -m sglang.launch_server --model-path {target} {flags}")
    inner: dict[str, Any] = {"decoding_type": tensorrt, "max_draft_len": guesses, "speculative_model": folder}
    if "taps" in artefact.config and "block_size" not in artefact.config:
        inner["eagle3_layers_to_capture"] = list(artefact.config["taps"])
    lines = [f"  {key}: {json.dumps(value)}" for key, value in inner.items()]
    return Told(engine, folder, {"speculative_config": inner}, "\n".join(["speculative_config:", *lines]))


def _write(out: Path, layout: Layout, told: Told, artefact: Artefact, subject: Subject) -> None:
    """Complete, or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    fresh.mkdir()
    try:
        (fresh / "config.json").write_text(json.dumps(dict(layout.config), indent=2) + "\n")
        tensors = {name: tensor.clone().contiguous() for name, tensor in layout.tensors.items()}
        save_torch_state_dict(tensors, fresh, max_shard_size=SHARD_BYTES)
        (fresh / "README.md").write_text(
            f"# {artefact.drafter} for {subject.name}, as {told.engine} reads it\n\n"
            f"Written by `outrider export`. {told.engine} is told of it so:\n\n```\n{told.how}\n```\n"
        )
        for file in fresh.iterdir():
            file.chmod(0o644)  # safetensors makes its files for their owner alone
        fresh.rename(out)  # an empty folder gives way
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
