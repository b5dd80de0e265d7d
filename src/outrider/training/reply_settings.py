"""What replies are made with, and the refusal to mix two kinds of them in one folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError
from outrider.training.turns import Messages, bits_of

if TYPE_CHECKING:
    from outrider.llm import LLM


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """What is generated, and when it is enough.

    Attributes:
        num_tokens: stop at so many reply tokens, of all ranks together; prompts are asked again, with other noise,
            until then (None: every prompt once). seconds: stop after so long (None: no limit).
        max_tokens: most tokens of a reply. temperatures: pairs of a temperature and its share of the conversations.
        follow_up: share of the conversations that go on for a second turn of a user, made up by the target.
        seed: of all noise. shard_tokens: tokens of a shard, and so what a kill can lose.
    """

    num_tokens: int | None = None
    seconds: float | None = None
    max_tokens: int = 384
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.3), (0.7, 0.3), (1.0, 0.4))
    follow_up: float = 0.0
    seed: int = 0
    shard_tokens: int = 1 << 18

    def __post_init__(self) -> None:
        for name in ("num_tokens", "seconds", "max_tokens", "shard_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r} is out of range: give a number above 0")
        if not 0 <= self.follow_up <= 1:
            raise ConfigError(f"follow_up={self.follow_up!r} is out of range: give a share in [0, 1]")
        if not self.temperatures or any(heat < 0 or share <= 0 for heat, share in self.temperatures):
            raise ConfigError(f"temperatures={self.temperatures!r}: give pairs of a temperature and a share above 0")


def describe(llm: LLM, asked: list[str | Messages] | None, settings: ReplySettings) -> dict[str, Any]:
    """What every conversation of a folder depends on, as plain data."""
    from outrider.models.heads.files import vocabulary_digest

    kept = {
        key: value for key, value in asdict(settings).items() if key not in ("num_tokens", "seconds", "shard_tokens")
    }
    prompts = None if asked is None else f"{bits_of(json.dumps(asked)):016x}"
    resolved = llm.resolved
    vocabulary = vocabulary_digest(llm.engine.target)
    made_by = {"model": resolved.model, "dtype": resolved.dtype, "vocabulary_sha256": vocabulary}
    described = {**made_by, "prompts": prompts, **kept}
    plain: dict[str, Any] = json.loads(json.dumps(described))  # tuples as lists, as they are read back
    return plain


def refuse_other_settings(folder: Path, there: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Hold what a shard says of itself against what is asked for.

    Raises:
        ConfigError: naming the first setting that differs.
    """
    for key in wanted:
        if there.get(key) != wanted[key]:
            raise ConfigError(
                f"{folder} holds replies made with {key}={there.get(key)!r} and {wanted[key]!r} is asked for: "
                "choose another folder, or the same settings"
            )
