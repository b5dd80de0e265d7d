"""Synthetic acceptance, for sweeps of speed alone: THE OUTPUT IS NOT VALID, and no front door leads here.

Trees are drafted and verified at their full price; then as many levels are kept as a given mean says, whatever the
target says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from outrider.engine.step import Engine, Flight
from outrider.errors import ConfigError, OutriderError
from outrider.measure.cycle import Decoding, TimedEngine, answer
from outrider.request import SamplingParams
from outrider.tree import DraftTree, Verdict

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
    made = SyntheticEngine(engine, tau, seed)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with made.always_guessing(depth, width):
        answer(made, prompts[:together], params, together)  # graphs are captured, caches filled
        made.cycles()
        answer(made, prompts, params, together)
    return Decoding.of(made.cycles(), alone)
