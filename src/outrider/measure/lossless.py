"""Is the text the same? Every prompt plain and with each drafter, alone and in a batch, compared token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

from outrider.errors import ConfigError, RequestError
from outrider.measure.prompts import Prompt
from outrider.record import Tally
from outrider.request import SamplingParams

Open = Callable[[str], Any]
"""A drafter's name to an `LLM` (or anything with its `generate` and `close`)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a text first left the plain one.

    Attributes:
        prompt: its name. drafter, temperature: of the run. mode: "solo" or "batch".
        position: index into the completion. plain, other: the two token ids, None where that text had ended.
        margin: log-probability of the plain run's likeliest token there, less that of the second (None if unknown).
    """

    prompt: str
    drafter: str
    temperature: float
    mode: str
    position: int
    plain: int | None
    other: int | None
    margin: float | None


@dataclass(slots=True)
class Comparison:
    """One drafter at one temperature against plain decoding.

    Attributes:
        compared: prompts compared; one that differs alone, in a batch or in both counts once in `differing`.
        refusals: why a prompt was refused by all runs alike (longer than the context, say); not in `compared`.
        tally: pooled over the speculative solo runs, whose depth control chooses. batch_tally: over the batched ones,
            which guess in every cycle. tokens, seconds (of the clock): solo runs, plain and speculative.
    """

    drafter: str
    temperature: float
    compared: int = 0
    differing: int = 0
    refusals: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    batch_tally: Tally = field(default_factory=Tally)
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def plain_rate(self) -> float | None:
        """Tokens per second without speculation."""
        return self.plain_tokens / self.plain_seconds if self.plain_seconds else None

    @property
    def rate(self) -> float | None:
        """Tokens per second with speculation."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def ratio(self) -> float | None:
        """Speculative over plain tokens per second; both had run and read the prompts before, and took turns."""
        return self.rate / self.plain_rate if self.rate and self.plain_rate else None

    def to_json(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter,
            "temperature": self.temperature,
            "compared": self.compared,
            "differing": self.differing,
            "refused": len(self.refusals),
            "first_difference": asdict(self.differences[0]) if self.differences else None,
            "drafted": self.tally.drafted,
            "accepted": self.tally.accepted,
            "tau": self.tally.tau,
            "batch": {
                "drafted": self.batch_tally.drafted,
                "accepted": self.batch_tally.accepted,
                "tau": self.batch_tally.tau,
            },
            "plain_tokens_per_second": self.plain_rate,
            "tokens_per_second": self.rate,
            "ratio": self.ratio,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All comparisons of one check; sums are pooled, never means of means."""

    comparisons: tuple[Comparison, ...]

    @property
    def differing(self) -> int:
        return sum(c.differing for c in self.comparisons)

    @property
    def compared(self) -> int:
        return sum(c.compared for c in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """The object `outrider check --json` prints: all comparisons pooled, then each of them."""
        pooled = Comparison(drafter="all", temperature=0.0)
        for c in self.comparisons:
            pooled.tally.add(c.tally)
            pooled.plain_tokens += c.plain_tokens
            pooled.plain_seconds += c.plain_seconds
            pooled.tokens += c.tokens
            pooled.seconds += c.seconds
        first = next((d for c in self.comparisons for d in c.differences), None)
        return {
            "compared": self.compared,
            "differing": self.differing,
            "first_difference": asdict(first) if first else None,
            "tau": pooled.tally.tau,
            "ratio": pooled.ratio,
            "comparisons": [c.to_json() for c in self.comparisons],
        }


def check(
    open_llm: Open,
    drafters: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float] = (0.0,),
    max_tokens: int = 128,
    seed: int = 0,
    raw: bool = False,
    batched: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Compare each drafter's texts with those of an engine that has no drafter.

    Prompt `i` runs with seed `seed + i`. Solo runs take turns, and who goes first alternates, so that a machine that
    slows down slows both. Batched runs hand over all prompts at once.

    Args:
        batched: leave the solo runs out: no speed is measured, and many prompts are compared several times sooner.
        progress: called with (runs done, runs in all).

    Raises:
        ConfigError: without drafters, prompts or temperatures. RequestError: for a bad prompt among batched ones.
    """
    if not (drafters and prompts and temperatures):
        raise ConfigError("nothing to compare: give at least one drafter, one prompt and one temperature")
    total, done = len(drafters) * len(temperatures) * (2 if batched else 2 * len(prompts) + 2), 0
    compare = _compare_batched if batched else _compare
    comparisons = []
    plain = open_llm("none")
    try:
        for drafter in drafters:
            llm = open_llm(drafter)
            try:
                for temperature in temperatures:
                    params = [
                        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + i)
                        for i in range(len(prompts))
                    ]
                    comparison = Comparison(drafter, temperature)
                    if not batched:
                        for engine in (plain, llm):
                            _warm_up(engine, prompts, params, raw)
                    for steps in compare(plain, llm, prompts, params, raw, comparison):
                        done += steps
                        progress(done, total)
                    comparisons.append(comparison)
            finally:
                llm.close()
                del llm  # gives its memory back before the next engine plans its own
    finally:
        plain.close()
    return Report(tuple(comparisons))


def _warm_up(engine: Any, prompts: Sequence[Prompt], params: Sequence[SamplingParams], raw: bool) -> None:
    """What would fall on whoever runs first: pages and tables that nobody touched, graphs, threads.

    Prompts are read on both sides as well: the plain engine is there for all drafters, and would find in its prefix
    cache what each new one has to read.
    """
    for prompt, wanted in zip(prompts, params, strict=True):
        _run(engine, prompt, replace(wanted, max_tokens=1), raw)
    _run(engine, prompts[0], params[0], raw)


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stands for the result of a prompt that an engine refused."""

    error: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "error"


def _run(engine: Any, prompt: Prompt, params: SamplingParams, raw: bool) -> Any:
    try:
        (result,) = engine.generate([prompt.content], params, raw=raw)
    except RequestError as error:
        return _Refused(str(error))
    return result


def _compare(
    plain: Any, llm: Any, prompts: Sequence[Prompt], params: Sequence[SamplingParams], raw: bool, into: Comparison
) -> Iterator[int]:
    """Fill one comparison; yields the number of runs each step took."""
    kept: list[tuple[Prompt, SamplingParams, Any, Any]] = []
    for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        runs = {}
        for engine in (plain, llm) if index % 2 == 0 else (llm, plain):
            started = time.perf_counter()
            runs[id(engine)] = (_run(engine, prompt, wanted, raw), time.perf_counter() - started)
        (expected, plain_seconds), (result, seconds) = runs[id(plain)], runs[id(llm)]
        if isinstance(expected, _Refused) and expected == result:
            into.refusals.append(expected.error)
        else:
            kept.append((prompt, wanted, expected, result))
        if expected.error is None and result.error is None:
            into.tally.add(result.tally)
            into.plain_tokens += expected.completion_tokens
            into.plain_seconds += plain_seconds
            into.tokens += result.completion_tokens
            into.seconds += seconds
        yield 2
    # One refused prompt would refuse its whole batch.
    together = [entry for entry in kept if not any(isinstance(result, _Refused) for result in entry[2:])]
    batches: dict[str, list[Any]] = {}
    for name, engine in (("none", plain), (into.drafter, llm)):
        # Alone, control may find that guessing does not pay, and nothing is put to the test; here it must guess.
        with engine.always_guessing():
            batches[name] = engine.generate([p.content for p, *_ in together], [w for _, w, *_ in together], raw=raw)
        yield 1
    for result in batches[into.drafter]:
        into.batch_tally.add(result.tally)
    places = {id(entry): place for place, entry in enumerate(together)}
    for entry in kept:
        prompt, wanted, expected, result = entry
        others = [(into.drafter, "solo", result)]
        if id(entry) in places:
            others += [(name, "batch", results[places[id(entry)]]) for name, results in batches.items()]
        found = [
            _difference(plain, prompt, wanted, raw, name, mode, expected, other)
            for name, mode, other in others
            if _first_difference(expected, other) is not None
        ]
        into.compared += 1
        into.differing += bool(found)
        into.differences += found


def _compare_batched(
    plain: Any, llm: Any, prompts: Sequence[Prompt], params: Sequence[SamplingParams], raw: bool, into: Comparison
) -> Iterator[int]:
    """Fill one comparison from one run of all prompts a side, guesses in every cycle of the second."""
    contents = [prompt.content for prompt in prompts]
    expected = plain.generate(contents, list(params), raw=raw)
    yield 1
    with llm.always_guessing():
        results = llm.generate(contents, list(params), raw=raw)
    yield 1
    for prompt, wanted, one, other in zip(prompts, params, expected, results, strict=True):
        into.compared += 1
        into.batch_tally.add(other.tally)
        if _first_difference(one, other) is not None:
            into.differing += 1
            into.differences.append(_difference(plain, prompt, wanted, raw, into.drafter, "batch", one, other))


def _first_difference(expected: Any, other: Any) -> int | None:
    """First position at which two completions differ; their common length where only how they ended does."""
    for position, (a, b) in enumerate(zip_longest(expected.token_ids, other.token_ids)):
        if a != b:
            return position
    same_end = (expected.finish_reason, expected.text, expected.error) == (other.finish_reason, other.text, other.error)
    return None if same_end else len(expected.token_ids)


def _difference(
    plain: Any, prompt: Prompt, params: SamplingParams, raw: bool, drafter: str, mode: str, expected: Any, other: Any
) -> Difference:
    position = _first_difference(expected, other)
    assert position is not None
    a, b = (r.token_ids[position] if position < len(r.token_ids) else None for r in (expected, other))
    margin = None if a is None else _margin(plain, prompt, params, raw, position)
    return Difference(prompt.name, drafter, params.temperature, mode, position, a, b, margin)


def _margin(plain: Any, prompt: Prompt, params: SamplingParams, raw: bool, position: int) -> float | None:
    """The top-2 margin of the plain law at a position: tiny where two tokens nearly tie."""
    wanted = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=position + 1, logprobs=2)
    result = _run(plain, prompt, wanted, raw)
    if result.error is not None or len(result.logprobs) <= position:
        return None
    (_, best), (_, second) = result.logprobs[position].top[:2]
    return best - second
