"""What to run: candidates race plain decoding on your prompts, losers stop early, and "leave it off" is an answer."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import numpy as np

from outrider.errors import ConfigError, OutriderError
from outrider.measure.prompts import Prompt
from outrider.measure.survey import Open
from outrider.record import Tally
from outrider.request import SamplingParams

PAYS = 1.02
"""A ratio to plain decoding from which on a drafter is worth its trouble."""
LEAST_BLOCKS, MOST_BLOCKS = 5, 40
"""Pairs of runs before an interval is believed, and after which no more are made."""
SHARP = 0.02
"""Half an interval's width (of the logarithm) that is narrow enough."""
RESAMPLES = 2000
NO_TIME = "no time was left"
SHORT = 24
"""Mean tokens of an answer under which reading the prompt is most of the work."""


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests at once, at a temperature."""

    concurrency: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.concurrency} at once, temperature {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio to plain decoding, and the bounds that hold it in 95 of 100 races (bootstrap over blocks of prompts)."""

    low: float
    ratio: float
    high: float


@dataclass(slots=True)
class Race:
    """One candidate under one load.

    Attributes:
        logs: logarithm of the ratio of seconds, plain over candidate, block by block. why: it stopped there.
        texts, tokens: answered by it.
    """

    drafter: str
    load: Load
    logs: list[float] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    texts: int = 0
    tokens: int = 0
    why: str = ""

    def interval(self) -> Interval | None:
        """None where too few blocks were run."""
        if len(self.logs) < LEAST_BLOCKS:
            return None
        logs = np.array(self.logs)
        drawn = np.random.default_rng(0).choice(logs, size=(RESAMPLES, len(logs))).mean(1)
        low, high = np.percentile(drawn, (2.5, 97.5))
        return Interval(math.exp(low), math.exp(logs.mean()), math.exp(high))

    @property
    def pays(self) -> bool:
        found = self.interval()
        return found is not None and found.low > PAYS

    def to_json(self) -> dict[str, Any]:
        found = self.interval()
        return {
            "drafter": self.drafter,
            "concurrency": self.load.concurrency,
            "temperature": self.load.temperature,
            "ratio": found and found.ratio,
            "low": found and found.low,
            "high": found and found.high,
            "blocks": len(self.logs),
            "tau": self.tally.tau,
            "stopped": self.why,
            "limits": self.limits(),
        }

    def limits(self) -> list[str]:
        """What keeps the gain from being larger."""
        tally, said = self.tally, []
        seconds = tally.seconds_draft + tally.seconds_verify + tally.seconds_sample
        if tally.cycles and tally.drafted < tally.cycles / 2:
            said.append("few guesses: there is seldom one, or control finds that it does not pay")
        elif tally.cycles and tally.accepted_by_position and tally.accepted_by_position[0] < tally.cycles / 2:
            share = tally.accepted_by_position[0] / tally.cycles
            said.append(f"acceptance: the first guess is kept in {share:.0%} of cycles")
        if seconds and tally.seconds_draft > seconds / 4:
            said.append(f"draft cost: {tally.seconds_draft / seconds:.0%} of a cycle's time goes into guessing")
        if self.texts and self.tokens < SHORT * self.texts:
            said.append(f"short answers: {self.tokens / self.texts:.0f} tokens, so that prompts are most of the work")
        return said


@dataclass(slots=True)
class Advice:
    """All races; `errors`: why a candidate could not run, by name."""

    loads: Sequence[Load]
    races: list[Race] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def under(self, load: Load) -> list[Race]:
        """The races of a load, best first; those without an interval are left out."""
        ranked = [(found.ratio, race) for race in self.races if race.load == load and (found := race.interval())]
        return [race for _, race in sorted(ranked, key=lambda pair: -pair[0])]

    def winner(self, load: Load) -> Race | None:
        """The best candidate that surely pays; None: leave it off."""
        return next((race for race in self.under(load) if race.pays), None)

    def ties(self, load: Load) -> list[Race]:
        """Candidates that pay too, and may be as good as the winner."""
        best = self.winner(load)
        least = best.interval() if best else None
        if best is None or least is None:
            return []
        others = [race for race in self.under(load) if race is not best and race.pays]
        return [race for race in others if (found := race.interval()) and found.high >= least.low]

    @property
    def undecided(self) -> list[str]:
        """Candidates without an interval under some load, by name."""
        return list(dict.fromkeys(race.drafter for race in self.races if race.interval() is None))

    @property
    def is_decided(self) -> bool:
        """Was there time for an interval of every candidate that could run, under every load?"""
        return not self.undecided

    def overall(self) -> str | None:
        """One drafter for all loads: the largest mean gain among those that surely lose nowhere; None: leave it off."""
        best, gain = None, math.log(PAYS)
        for drafter in dict.fromkeys(race.drafter for race in self.races):
            found = [race.interval() for race in self.races if race.drafter == drafter]
            if len(found) < len(self.loads) or any(each is None or each.high < 1 for each in found):
                continue
            mean = sum(math.log(each.ratio) for each in found if each) / len(found)
            if mean > gain and any(race.pays for race in self.races if race.drafter == drafter):
                best, gain = drafter, mean
        return best


def race_all(
    open_llm: Open,
    drafters: Sequence[str],
    prompts: Sequence[Prompt],
    loads: Sequence[Load],
    *,
    max_tokens: int,
    budget: float,
    raw: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> Advice:
    """Race every candidate against plain decoding, block by block, under every load, within so many seconds.

    A candidate stops under a load as soon as it has surely lost, to plain decoding or to a candidate before it, or its
    interval is narrow; what it leaves of its time goes to those behind it. Each may take what is left for a first
    interval, so that with too little time the first are decided and the last are not raced, instead of none. Engines
    open one beside the plain one.

    Raises:
        ConfigError: nothing to race, or a prompt failed; a candidate that cannot be built is told of in `errors`.
    """
    if not (drafters and prompts and loads):
        raise ConfigError("nothing to advise on: give at least one drafter, one prompt and one load")
    advice, end = Advice(loads), clock() + budget
    with closing(open_llm({"drafter": "none", "prefix_cache": False})) as plain:
        for index, drafter in enumerate(drafters):
            if index and clock() > end:
                advice.races += [Race(drafter, load, why=NO_TIME) for load in loads]
                continue
            try:
                llm = open_llm({"drafter": drafter, "prefix_cache": False})
            except OutriderError as error:
                advice.errors[drafter] = str(error)
                continue
            with closing(llm):
                for place, load in enumerate(loads):
                    progress(f"{drafter}, {load}")
                    left = (len(drafters) - index - 1) * len(loads) + len(loads) - place
                    until = clock() + max(0.0, end - clock()) / left
                    race = Race(drafter, load)
                    best = advice.winner(load)
                    bar = best.interval() if best else None
                    _run(race, plain, llm, prompts, max_tokens, raw, (until, end), bar.low if bar else 1.0, clock)
                    advice.races.append(race)
    return advice


def _run(
    race: Race,
    plain: Any,
    llm: Any,
    prompts: Sequence[Prompt],
    max_tokens: int,
    raw: bool,
    until: tuple[float, float],
    bar: float,
    clock: Callable[[], float],
) -> None:
    """Blocks in turns until the race is decided; `bar`: the ratio under which it is lost.

    until: when its own time is over, and when all time is: until then it may borrow for its first interval, as many
    candidates with none would be no answer.
    """
    blocks = _blocks(prompts, race.load, max_tokens)
    contents, params = next(blocks)
    for engine in (plain, llm):  # warm-up: caches, threads, graphs, lazily made tables
        engine.generate(contents, params, raw=raw)
    for turn, (contents, params) in enumerate(islice(blocks, MOST_BLOCKS)):
        seconds = {}
        for engine in (plain, llm) if turn % 2 == 0 else (llm, plain):
            began = clock()
            results = engine.generate(contents, params, raw=raw)
            seconds[id(engine)] = clock() - began
            failed = next((result.error for result in results if result.error is not None), None)
            if failed is not None:
                raise ConfigError(f"a prompt failed: {failed}")
            if engine is llm:
                for result in results:
                    race.tally.add(result.tally)
                    race.tokens += result.completion_tokens
                race.texts += len(results)
        race.logs.append(math.log(seconds[id(plain)] / seconds[id(llm)]))
        found = race.interval()
        if found is not None and found.high < bar:
            race.why = "it had lost"
        elif found is not None and math.log(found.high / found.low) < 2 * SHARP:
            race.why = "it was decided"
        elif clock() > until[found is None]:
            race.why = "its time was over"
        if race.why:
            return
    race.why = "all blocks were run"


def _blocks(prompts: Sequence[Prompt], load: Load, max_tokens: int) -> Iterator[tuple[list[Any], list[SamplingParams]]]:
    """Prompts in turns, as many at once as the load says, each with a seed of its own."""
    turns = cycle(prompts)
    seed = 0
    while True:
        contents = [prompt.content for prompt in islice(turns, load.concurrency)]
        params = [
            SamplingParams(temperature=load.temperature, max_tokens=max_tokens, seed=seed + i)
            for i in range(load.concurrency)
        ]
        seed += load.concurrency
        yield contents, params


def elsewhere(entry: tuple[Mapping[str, Any], str | None] | None, depth: int, weights: str | None) -> tuple[str, str]:
    """vLLM's `--speculative-config` and SGLang's flags for an entry of the registry's `ELSEWHERE`.

    Args:
        depth: guesses a cycle. weights: of a model of Transformers that drafts, where there is one.
    """
    if entry is None:
        return "no equal: it has no such cascade, or wants its weights by `outrider export`", "no equal"
    config, algorithm = dict(entry[0]), entry[1]
    flags = f"--speculative-algorithm {algorithm} --speculative-num-draft-tokens {depth}"
    if weights is not None:
        config["model"] = weights
        flags += f" --speculative-draft-model-path {weights}"
    config["num_speculative_tokens"] = depth
    return f"--speculative-config '{json.dumps(config)}'", flags if algorithm else "no equal"
