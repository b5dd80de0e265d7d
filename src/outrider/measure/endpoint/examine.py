"""Is a server lossless? All tests of an endpoint, alone or beside a reference, one after the other."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.util import find_spec

from outrider.errors import ConfigError
from outrider.measure.endpoint import drawn, ends, shapes, texts
from outrider.measure.endpoint.answers import Broken, Refused
from outrider.measure.endpoint.client import Endpoint, Silent
from outrider.measure.endpoint.findings import Finding, Report, judged
from outrider.measure.endpoint.plan import Plan
from outrider.measure.endpoint.subject import Subject, meet
from outrider.measure.prompts import Messages

Test = tuple[str, Callable[[], Awaitable[Finding]]]


async def examine(
    endpoint: Endpoint,
    prompts: Sequence[str | Messages],
    plan: Plan,
    reference: Endpoint | None = None,
    begin: Callable[[str], None] = lambda power: None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Report:
    """Put a server to every test.

    Args:
        reference: a server of the same model that is trusted, plain say. begin: told, before any draw, what the draws
            can see. progress: called with (test, tests done, tests in all).

    Raises:
        ConfigError: a server cannot be reached, or fails at the plainest question; SciPy is not installed.
    """
    if find_spec("scipy") is None:
        raise ConfigError('check --endpoint needs SciPy: install "outrider[serve]"')
    started = time.monotonic()
    subject = await meet(endpoint, prompts, plan)
    other = None if reference is None else await meet(reference, prompts, plan)
    power = drawn.power(plan, subject.num_top)
    begin(power)
    findings, tests = list[Finding](), list(_tests(subject, other))
    for done, (name, test) in enumerate(tests):
        progress(name, done, len(tests))
        findings.append(await _found(name, test))
        gone = findings[-1].status == "broken" and await _gone(subject, other)
        if gone:
            findings += [Finding(name, "untested", gone, remedy="start it anew") for name, _ in tests[done + 1 :]]
            break
    return Report(
        url=endpoint.url,
        model=endpoint.model or "",
        reference=None if reference is None else reference.url,
        power=power,
        findings=tuple(judged(findings)),
        requests=endpoint.num_asked,
        seconds=time.monotonic() - started,
    )


async def _found(name: str, test: Callable[[], Awaitable[Finding]]) -> Finding:
    try:
        return await test()
    except Refused as error:
        return Finding(name, "refused", str(error))
    except Broken as error:
        return Finding(name, "broken", str(error), error.remedy)


async def _gone(*subjects: Subject | None) -> str | None:
    """Which server does not answer any more, as every test left would wait for it in vain."""
    for subject in filter(None, subjects):
        try:
            await subject.endpoint.ask(subject.ask(0, max_tokens=1))
        except Silent as error:
            return f"{subject.endpoint.url} answers no more: {error}"
        except (Refused, Broken):
            continue
    return None


def _tests(subject: Subject, reference: Subject | None) -> Iterator[Test]:
    """In the order of the report; those of laws come last, as they take longest."""
    yield "greedy: in company", lambda: texts.together(subject)
    if reference is not None:
        yield "greedy: against the reference", lambda: texts.against(subject, reference)
    if subject.num_top:
        yield "greedy: the likeliest token", lambda: texts.likeliest(subject)
        yield "greedy: read anew", lambda: texts.reread(subject)
        for name in ("frequency_penalty", "presence_penalty"):
            yield f"{name}: greedy", lambda name=name: texts.penalised(subject, name)  # type: ignore[misc]
        yield "logit_bias", lambda: shapes.bias(subject)
        yield "repetition_penalty", lambda: shapes.repetition(subject)
    yield "max_tokens", lambda: ends.limits(subject)
    yield "stop", lambda: ends.stops(subject)
    yield "end of text", lambda: ends.own_end(subject)
    yield "usage", lambda: ends.usage(subject)
    yield "stream", lambda: shapes.streams(subject)
    yield "seed", lambda: shapes.seeds(subject)
    yield "n", lambda: shapes.choices(subject)
    yield "logprobs", lambda: shapes.logprobs(subject)
    for trial in drawn.TRIALS:
        if trial.fields is not None or reference is not None:
            yield f"{trial.name}: law", lambda trial=trial: drawn.drawn(subject, trial, reference)  # type: ignore[misc]
    if subject.num_top:
        yield "all laws together", lambda: _now(drawn.pooled(subject))
        yield "logprobs: one history, one law", lambda: _now(drawn.one_law(subject))
    if reference is not None and subject.num_top and reference.num_top:
        yield "logprobs: against the reference", lambda: _now(drawn.compared(subject, reference))


async def _now(finding: Finding) -> Finding:
    """A finding from what was asked before."""
    return finding
