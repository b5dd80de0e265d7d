"""The start-up probe counts levels, each right in one sibling at most: wide trees are judged like chains."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from outrider.engine.drafter_probe import DEPTH, NUM_TOKENS, probe_drafter
from outrider.errors import ConfigError


def engine(width: int, accepted_a_cycle: float) -> SimpleNamespace:
    """Whatever it is asked, it finishes with these counts."""
    cycles = 40

    def add(request) -> None:
        tally = request.tally
        tally.cycles, tally.drafted = cycles, cycles * DEPTH * width
        tally.accepted = int(cycles * accepted_a_cycle)
        request.phase = type(request.phase).FINISHED

    return SimpleNamespace(
        scheduler=SimpleNamespace(max_context=2 * NUM_TOKENS),
        target=SimpleNamespace(vocab_size=100),
        drafter=SimpleNamespace(name="eagle3"),
        add=add,
        always_guessing=lambda depth: nullcontext(),
    )


@pytest.mark.parametrize("width", [1, 4, 32])
def test_a_drafter_that_is_right_every_other_cycle_is_kept_at_any_width(width):
    found = probe_drafter(engine(width, 0.5))
    assert (found.drafted, found.accepted) == (40 * DEPTH * width, 20)


@pytest.mark.parametrize("width", [1, 32])
def test_one_that_is_never_right_is_refused(width):
    with pytest.raises(ConfigError, match="guessed 0 of 80 tokens right"):
        probe_drafter(engine(width, 0.0))
