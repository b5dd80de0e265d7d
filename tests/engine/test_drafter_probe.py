"""The start-up probe judges chains: of many siblings one is right by chance, and one right of many is no chance."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from outrider.engine.drafter_probe import DEPTH, NUM_TOKENS, probe_drafter
from outrider.errors import ConfigError


def engine(width: int, accepted_a_cycle: float) -> SimpleNamespace:
    """One whose user chose trees of `width`; whatever it is asked, it finishes with these counts."""
    cycles = 40
    probed = [width]
    requests = []

    @contextmanager
    def always_guessing(depth: int, width: int | None = None):
        probed[0] = width or probed[0]
        yield
        probed[0] = None

    def step() -> None:
        tally = requests[0].tally
        tally.cycles, tally.drafted = cycles, cycles * DEPTH * probed[0]
        tally.accepted = int(cycles * accepted_a_cycle)
        requests[0].phase = type(requests[0].phase).FINISHED

    return SimpleNamespace(
        scheduler=SimpleNamespace(max_context=2 * NUM_TOKENS),
        target=SimpleNamespace(vocab_size=100),
        drafter=SimpleNamespace(name="eagle3"),
        add=requests.append,
        step=step,
        always_guessing=always_guessing,
    )


@pytest.mark.parametrize("width", [1, 4, 32])
def test_a_drafter_that_is_right_every_other_cycle_is_kept_at_any_width(width):
    found = probe_drafter(engine(width, 0.5))
    assert (found.drafted, found.accepted) == (40 * DEPTH, 20)


@pytest.mark.parametrize("width", [1, 32])
def test_one_that_is_never_right_is_refused(width):
    with pytest.raises(ConfigError, match="guessed 0 of 80 tokens right"):
        probe_drafter(engine(width, 0.0))


@pytest.mark.parametrize(
    ("doubts", "cause"),
    [
        (None, "trained for another target"),
        ([], "train it longer"),
        (["its target rotates otherwise", "and more"], "its target rotates otherwise; choose one"),
    ],
)
def test_the_likely_cause_is_named(doubts, cause):
    with pytest.raises(ConfigError, match=cause):
        probe_drafter(engine(1, 0.0), doubts)
