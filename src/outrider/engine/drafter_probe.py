"""A start-up probe of 64 tokens: a drafter that agrees with its target no more than chance is not the right one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafters.base import Drafter
from outrider.engine.step import Engine
from outrider.errors import ConfigError
from outrider.models.heads import files, wiring
from outrider.models.target import Target
from outrider.request import Request, SamplingParams

NUM_TOKENS = 64
DEPTH = 2
CHANCE = 0.03
"""Share of guesses that even unrelated models of one vocabulary get right (frequent words, line breaks)."""
PROBE_ID = -1
"""No front door gives a request this id."""


@dataclass(frozen=True, slots=True)
class DrafterProbe:
    """How many of its guesses were what the target said."""

    drafted: int
    accepted: int


def doubts_of(target: Target, drafter: Drafter, model: str | None) -> list[str] | None:
    """How the target differs from the one that the drafter's weights were trained for; None where nobody knows.

    model: the drafter's own weights, where they were named.
    """
    entries = ((name, files.trained_for(name, model, target)) for name in drafter.name.split("+"))
    told = [wiring.doubts(name, entry, target) for name, entry in entries if entry is not None]
    known = [doubts for doubts in told if doubts is not None]
    return [doubt for doubts in known for doubt in doubts] if known else None


def probe_drafter(engine: Engine, doubts: Sequence[str] | None = None) -> DrafterProbe:
    """Decode 64 greedy tokens with guesses at a fixed depth, then leave nothing behind.

    Args:
        doubts: how its target differs from the one that it was trained for; None where nobody knows.

    Raises:
        ConfigError: where the guesses are no better than chance, naming the likely cause.
    """
    room = engine.scheduler.max_context // 2
    # Ids from the middle of the vocabulary are words in every tokenizer, and mean as much to one model as to another.
    middle = engine.target.vocab_size // 2
    prompt = tuple(range(middle, middle + min(8, room)))
    request = Request(PROBE_ID, prompt, SamplingParams(), seed=0, limit=min(NUM_TOKENS, room))
    engine.add(request)
    with engine.always_guessing(DEPTH, width=1):  # more siblings would be right more often by chance
        while not request.is_finished:
            engine.step()
    tally = request.tally
    if request.error is not None:
        raise ConfigError(f"the start-up probe failed ({request.error}): check the weights of both models")
    if tally.drafted and tally.accepted < max(1, CHANCE * tally.drafted):
        name = engine.drafter.name if engine.drafter else "none"
        raise ConfigError(
            f"the drafter {name} guessed {tally.accepted} of {tally.drafted} tokens right, no better than chance: "
            + _cause(doubts)
        )
    return DrafterProbe(tally.drafted, tally.accepted)


def _cause(doubts: Sequence[str] | None) -> str:
    if doubts is None:
        return (
            "its model was probably trained for another target, or its weights did not load; "
            "choose one of the target's own family"
        )
    if doubts:
        return f"{doubts[0]}; choose one that was trained for this target"
    return "it is whole and this is the target that it was trained for, so it has not learnt enough; train it longer"
