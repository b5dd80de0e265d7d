"""How fast, against plain decoding: runs take turns, ratios are taken prompt by prompt, a failed run is a failure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.errors import ConfigError
from outrider.measure.contenders import Contender, Parts, Run
from outrider.measure.intervals import Interval, median, percentiles
from outrider.measure.prompts import Prompt
from outrider.record import Tally

PLAIN = "plain"
"""The contender that the others are compared with."""


@dataclass(slots=True)
class Figures:
    """One contender's runs, each of a block of prompts; a block that was run again has its number again.

    Attributes:
        blocks: number and names of the prompts of each run.
    """

    runs: list[Run] = field(default_factory=list)
    blocks: list[tuple[int, str]] = field(default_factory=list)

    @property
    def answered(self) -> list[Run]:
        return [run for run in self.runs if run.error is None]

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Prompts, and why there is no answer."""
        return [(name, run.error) for (_, name), run in zip(self.blocks, self.runs, strict=True) if run.error]

    @property
    def rate(self) -> float | None:
        """Pooled tokens per second, prompts read included; None where nothing was answered."""
        runs = self.answered
        return sum(run.tokens for run in runs) / sum(run.seconds for run in runs) if runs else None

    def ratios(self, other: Figures, of: Callable[[Run], float | None] = lambda run: run.seconds) -> list[float]:
        """This contender's tokens a second over the other's, block by block, over all the runs that both answered.

        of: the seconds of a run; None where it has none, which leaves the pair out.
        """
        mine: dict[int, list[float]] = {}
        for (number, _), a, b in zip(self.blocks, self.runs, other.runs, strict=True):
            first, second = of(a), of(b)
            if a.error is None and b.error is None and first and second:
                sums = mine.setdefault(number, [0.0] * 4)
                for place, value in enumerate((a.tokens, first, b.tokens, second)):
                    sums[place] += value
        return [(tokens / seconds) / (plain / spent) for tokens, seconds, plain, spent in mine.values()]

    def ratio(self, other: Figures) -> Interval | None:
        """Median over blocks of the ratio, with bounds; None where there is no pair."""
        return median(self.ratios(other))

    def decode_ratio(self, other: Figures) -> Interval | None:
        """As `ratio`, of the passes that only decode: what a prompt takes is left out."""
        return median(self.ratios(other, _seconds_a_token))

    def pooled(self) -> Tally:
        tally = Tally()
        for run in self.answered:
            if run.tally is not None:
                tally.add(run.tally)
        return tally

    def parts(self) -> Parts | None:
        """Where the seconds of all answered runs went; None where nobody knows."""
        known = [run.parts for run in self.answered if run.parts is not None]
        whole = Parts()
        for parts in known:
            whole.add(parts)
        return whole if known else None

    @property
    def context(self) -> int:
        """Mean known tokens in the middle of an answer."""
        runs = self.answered
        return sum(run.context for run in runs) // len(runs) if runs else 0

    def add(self, more: Figures) -> None:
        """Append another set of prompts, answered by the same contender."""
        behind = 1 + max((number for number, _ in self.blocks), default=-1)
        self.runs += more.runs
        self.blocks += [(behind + number, name) for number, name in more.blocks]

    def to_json(self, plain: Figures) -> dict[str, Any]:
        """Plain data; what could not be measured is null, and counted in `failed`."""
        tally, parts = self.pooled(), self.parts()
        ratios = self.ratios(plain)
        ratio, decode = self.ratio(plain), self.decode_ratio(plain)
        return {
            "runs": len(self.runs),
            "failed": len(self.failures),
            "failures": [{"prompt": name, "error": error} for name, error in self.failures],
            "tokens_per_second": self.rate,
            "ratio_to_plain": ratio and ratio.ratio,
            "interval": ratio and [ratio.low, ratio.high],
            "least_ratio": min(ratios, default=None),
            "decode_ratio": decode and decode.to_json(),
            "estimated": tally.saving.to_json(),
            "tau": tally.tau,
            "cycles": tally.cycles,
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "accepted_by_position": tally.accepted_by_position,
            "first_token": percentiles([value for run in self.answered for value in run.first]),
            "between": percentiles([value for run in self.answered for value in run.gaps]),
            "token": percentiles([value for run in self.answered for value in run.between]),
            "parts": parts and asdict(parts),
            "price_misses": self.misses(),
        }

    def misses(self) -> dict[str, Any]:
        """How far control's prices were from what cycles took: medians, without guesses, with, and of all."""
        without, guessing = ([miss for run in self.answered for miss in run.misses[kind]] for kind in (False, True))
        kinds = {"plain": without, "guessing": guessing, "all": without + guessing}
        return {
            kind: {"cycles": len(found), "median": statistics.median(found)} for kind, found in kinds.items() if found
        }


def _seconds_a_token(run: Run) -> float | None:
    """Seconds of the answer's tokens at the rate at which they were decoded."""
    rate = run.decode_rate
    return run.tokens / rate if rate else None


def blocks_of(prompts: Sequence[Prompt], together: int) -> Iterator[list[Prompt]]:
    """So many prompts at a time; the last block is filled up from the beginning."""
    for start in range(0, len(prompts), together):
        yield [prompts[(start + i) % len(prompts)] for i in range(together)]


def bench(
    contenders: Mapping[str, Contender],
    prompts: Sequence[Prompt],
    max_tokens: int,
    repeats: int = 1,
    together: int = 1,
    warm: bool = True,
    first: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Figures]:
    """Let every contender answer every prompt, so many together; who begins changes from block to block.

    first: whose turn it is to begin, by number. warm: all begin with a few tokens that nobody times: caches, threads,
    lazily made tables.

    Raises:
        ConfigError: without prompts, or where nobody is called `PLAIN`. A run that fails is told of in its figures.
    """
    if not prompts or PLAIN not in contenders:
        raise ConfigError("nothing to measure: give at least one prompt")
    names = list(contenders)
    figures = {name: Figures() for name in names}
    blocks = list(blocks_of(prompts, together))
    for contender in contenders.values() if warm else ():
        contender(blocks[0], 8)
    for turn in range(repeats * len(blocks)):
        number = turn % len(blocks)
        said = ", ".join(dict.fromkeys(prompt.name for prompt in blocks[number]))
        start = (first + turn) % len(names)
        for name in (*names[start:], *names[:start]):
            figures[name].runs.append(contenders[name](blocks[number], max_tokens))
            figures[name].blocks.append((number, said))
        progress(turn + 1, repeats * len(blocks))
    return figures
