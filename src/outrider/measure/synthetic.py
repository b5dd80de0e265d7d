"""Synthetic acceptance, for sweeps of speed alone: THE OUTPUT IS NOT VALID, and no front door leads here.

Trees are drafted and verified at their full price; then as many levels are kept as a given mean says, whatever the
target says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.cache.pages import Pages
from outrider.engine.device_cycle import DeviceCycle
from outrider.engine.step import Engine, Flight
from outrider.errors import ConfigError, OutriderError
from outrider.measure.cycle import Decoding, TimedEngine, answer
from outrider.measure.flight import Log, decoding
from outrider.models.batch import TargetOutput
from outrider.models.seats import Crew, Outline, Seats, TreeRows
from outrider.models.target import Target
from outrider.request import SamplingParams
from outrider.tree import DraftTree, Verdict

SCHEDULE, SEATS_APART = 4096, 997
"""Lengths that are drawn beforehand, to be taken in turns; how far neighbouring seats stand apart in them."""
NOT_VALID = "OUTPUT NOT VALID (synthetic acceptance)"
"""Stands beside every figure that was measured so."""


class SyntheticEngine(TimedEngine):
    """Keeps `tau - 1` guesses a cycle in the mean: the whole part always, one more with the chance of the rest (the
    least varying schedule, as vLLM's), and of a tree that is not that deep all of its deepest path.

    Args:
        tau: wanted mean of tokens a cycle, the target's own included; at least 1. seed: of what is drawn.
    """

    def __init__(self, engine: Engine, tau: float, seed: int = 0) -> None:
        super().__init__(engine)
        if tau < 1:
            raise ConfigError(f"tau={tau} is out of range: a cycle yields at least 1 token")
        self._extra = tau - 1
        self._dice = random.Random(seed)

    def _verify(self, flight: Flight) -> list[Verdict | OutriderError | None]:
        found = super()._verify(flight)
        return [
            self._invented(tree, verdict) if isinstance(verdict, Verdict) else verdict
            for tree, verdict in zip(flight.trees, found, strict=True)
        ]

    def _invented(self, tree: DraftTree, verdict: Verdict) -> Verdict:
        """A verdict of the wanted length along the deepest path; its last token is one that the target drew."""
        if not tree.tokens:
            return verdict
        whole = int(self._extra)
        length = whole + (self._dice.random() < self._extra - whole)
        depths = tree.depths()
        path = tree.path(max(range(len(tree)), key=depths.__getitem__))[:length]
        return Verdict(tuple(path), (*(tree.tokens[node] for node in path), verdict.tokens[-1]))


class SyntheticCycle(DeviceCycle):
    """The same on the device, for chains: what the target says is overwritten before anyone walks by it."""

    def __init__(self, target: Target, pages: Pages, seats: Seats, tau: float, seed: int = 0) -> None:
        super().__init__(target, pages, seats)
        whole, dice = int(tau - 1), random.Random(seed)
        lengths = [whole + (dice.random() < tau - 1 - whole) for _ in range(SCHEDULE)]
        self._lengths = torch.tensor(lengths, device=target.device)
        self._count = torch.zeros(1, dtype=torch.int64, device=target.device)

    def _draws(self, crew: Crew, rows: TreeRows, output: TargetOutput, outline: Outline) -> Tensor:
        draws = super()._draws(crew, rows, output, outline).view(crew.size, -1)
        self._count += 1
        places = torch.arange(crew.size, device=draws.device) * SEATS_APART + self._count
        lengths = self._lengths.index_select(0, places % SCHEDULE)[:, None]
        said, guesses = draws[:, :-1], rows.trees.tokens.view(crew.size, -1)
        steps = torch.arange(outline.nodes, device=draws.device)
        other = torch.where(guesses > 0, guesses - 1, 1)  # no guess is right behind the last that is kept
        said = torch.where((steps == lengths) & (said == guesses), other, said)
        said = torch.where((steps < lengths) & (guesses >= 0), guesses, said)
        return torch.cat([said, draws[:, -1:]], dim=1).flatten()


@contextmanager
def flying(engine: Engine, tau: float, depth: int, seed: int = 0) -> Iterator[None]:
    """Within the block the engine's cycles in flight are chains of `depth` guesses, kept as `tau` says."""
    assert engine.pipeline is not None
    cycle = SyntheticCycle(engine.target, engine.pages, engine.pipeline.seats, tau, seed)
    with engine.pipeline.flying_by(cycle), engine.always_guessing(depth, 1):
        yield


def measure_synthetic(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    tau: float,
    max_tokens: int,
    *,
    depth: int,
    width: int = 1,
    together: int = 1,
    seed: int = 0,
    alone: Callable[[int], float] | None = None,
) -> Decoding:
    """Decode prompts (token ids) with trees of a fixed shape; only times are true, and no text is given out.

    Args:
        alone: see `Decoding.of`.

    Raises:
        ConfigError: for a mean that trees of this depth cannot reach, or where a request failed.
    """
    if not 1 <= tau <= depth + 1:
        raise ConfigError(f"tau={tau} cannot be reached by trees of {depth} levels: give 1 to {depth + 1}")
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    if engine.pipeline is not None and width == 1:
        with flying(engine, tau, depth, seed):
            log = Log(engine)
            answer(engine, prompts[:together], params, together)  # graphs are captured
            answer(engine, prompts, params, together, log.note)
            return decoding(engine, prompts[:together], params, log.cycles())
    made = SyntheticEngine(engine, tau, seed)
    with made.always_guessing(depth, width):
        answer(made, prompts[:together], params, together)  # graphs are captured, caches filled
        made.cycles()
        answer(made, prompts, params, together)
    return Decoding.of(made.cycles(), alone)
