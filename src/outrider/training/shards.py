"""A corpus on disk: shards of conversations that are whole or not there, and a summary of them all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from outrider.errors import ConfigError

FORMAT = 1
PATTERN = "shard-*.safetensors"
SUMMARY = "corpus.json"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids of a prompt and of the target's own reply to it.

    Attributes:
        job: number of the job that made it; a job with follow-ups makes several. prompt_digest: 63 bits of its prompt.
    """

    job: int
    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    temperature: float
    prompt_digest: int


@dataclass(slots=True)
class Shard:
    """Conversations that are not written yet, and what was left out while they were made, by reason."""

    conversations: list[Conversation] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, conversation: Conversation) -> None:
        self.conversations.append(conversation)
        self.num_tokens += len(conversation.prompt) + len(conversation.reply)

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class Written:
    """What is known of a shard on disk without reading its tokens.

    Attributes:
        jobs, prompt_digests: of its conversations. settings: those it was made with. counts: `_counts`.
    """

    number: int
    jobs: list[int]
    prompt_digests: list[int]
    settings: dict[str, Any]
    counts: dict[str, Any]


def write_shard(folder: Path, number: int, shard: Shard, settings: dict[str, Any]) -> None:
    """Write `shard-<number>.safetensors`, whole or not at all.

    Tensors: `tokens` (N,) int32, conversations end to end; `starts` (C + 1,) int64, where each begins; `replies` (C,)
    int64, offset within a conversation where the reply begins; `jobs`, `prompt_digests` (C,) int64; `temperatures` (C,)
    float32.

    Raises:
        ConfigError: if the disk is full or the folder cannot be written; what is there stays.
    """
    rows = sorted(shard.conversations, key=lambda row: row.job)  # stable: follow-ups keep their order
    lengths = [len(row.prompt) + len(row.reply) for row in rows]
    tensors = {
        "tokens": torch.tensor([token for row in rows for token in (*row.prompt, *row.reply)], dtype=torch.int32),
        "starts": torch.tensor([0, *lengths]).cumsum(0),
        "replies": torch.tensor([len(row.prompt) for row in rows]),
        "jobs": torch.tensor([row.job for row in rows]),
        "prompt_digests": torch.tensor([row.prompt_digest for row in rows]),
        "temperatures": torch.tensor([row.temperature for row in rows], dtype=torch.float32),
    }
    notes = {"settings": settings, "counts": _counts(shard)}
    data = save(tensors, {key: json.dumps(value, sort_keys=True) for key, value in notes.items()})
    try:
        write_whole(folder / f"shard-{number:05d}.safetensors", data)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}): what it holds stays; make room and run the same command"
        ) from error


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file at once: a kill or a full disk leaves what was there.

    Raises:
        OSError: as the system says.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_written(folder: Path) -> Iterator[Written]:
    """All shards of a folder, by number.

    Raises:
        ConfigError: for a file that is no shard, by name.
    """
    for path in sorted(folder.glob(PATTERN)):
        try:
            with safe_open(path, framework="pt") as file:
                notes = file.metadata()
                yield Written(
                    int(path.stem.partition("-")[2]),
                    file.get_tensor("jobs").tolist(),
                    file.get_tensor("prompt_digests").tolist(),
                    json.loads(notes["settings"]),
                    json.loads(notes["counts"]),
                )
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no shard of replies ({error}): remove it, or choose another folder"
            ) from error


def summarise(folder: Path) -> dict[str, Any]:
    """Write `corpus.json` anew from all shards that are there, and return what it says.

    Several processes may do so at once: the last of them has seen every shard.

    Raises:
        ConfigError: for a file that is no shard, or a full disk.
    """
    while True:
        paths = sorted(folder.glob(PATTERN))
        totals = _counts(Shard())
        settings: dict[str, Any] = {}
        for written in read_written(folder):
            settings = written.settings
            _pool(totals, written.counts)
        digest = hashlib.sha256()
        for path in paths:
            digest.update(path.read_bytes())
        found = {"format": FORMAT, "settings": settings, "shards": len(paths), **totals, "sha256": digest.hexdigest()}
        try:
            write_whole(folder / SUMMARY, (json.dumps(found, indent=2, sort_keys=True) + "\n").encode())
        except OSError as error:
            raise ConfigError(f"{folder / SUMMARY} cannot be written ({error.strerror}): make room") from error
        if sorted(folder.glob(PATTERN)) == paths:
            return found


def combined(folders: Sequence[Path]) -> dict[str, Any]:
    """What the summaries of several corpora say together; the digest is of their digests.

    Raises:
        ConfigError: for a folder without a summary.
    """
    totals: dict[str, Any] = {}
    digest = hashlib.sha256()
    settings = []
    for folder in folders:
        try:
            found = json.loads((folder / SUMMARY).read_text())
            digest.update(found.pop("sha256").encode())
            settings.append(found.pop("settings"))
            found.pop("format")
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise ConfigError(f"{folder} has no {SUMMARY} that can be read: run `outrider replies` again") from error
        _pool(totals, found)
    return {"settings": settings, **totals, "sha256": digest.hexdigest()}


def _counts(shard: Shard) -> dict[str, Any]:
    by_temperature: dict[str, int] = {}
    for row in shard.conversations:
        by_temperature[str(row.temperature)] = by_temperature.get(str(row.temperature), 0) + 1
    return {
        "conversations": len(shard.conversations),
        "tokens": shard.num_tokens,
        "reply_tokens": sum(len(row.reply) for row in shard.conversations),
        "by_temperature": by_temperature,
        "left_out": shard.left_out,
    }


def _pool(totals: dict[str, Any], counts: dict[str, Any]) -> None:
    """Add counts to counts, key by key."""
    for key, value in counts.items():
        if isinstance(value, dict):
            _pool(totals.setdefault(key, {}), value)
        else:
            totals[key] = totals.get(key, 0) + value
