"""The server under test: what it is asked, what it can tell, and its greedy texts, which many tests start from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.errors import ConfigError
from outrider.measure.endpoint.answers import Broken, Refused, Reply, Sample
from outrider.measure.endpoint.client import Ask, Endpoint
from outrider.measure.endpoint.findings import Finding
from outrider.measure.endpoint.laws import Fields, Laws, apart, told, warped
from outrider.measure.endpoint.plan import Plan
from outrider.measure.endpoint.statistics import Draw
from outrider.measure.prompts import Messages

FEW = 8
TOPS = (20, 5)
"""Likeliest tokens to ask for: what most servers allow at most, and what OpenAI's completions do."""


@dataclass(slots=True)
class Subject:
    """A server and what was learnt of it.

    Attributes:
        num_top: likeliest tokens it tells of, 0 where it tells none. tells: log-probabilities of the model's own law
            ("raw"), or after temperature and other fields ("warped"). samples: choices a request may have.
        extras: fields that keep a text from ending by itself, where it takes them. greedy: answers to all prompts, each
            asked alone. laws: the model's own, by history, as told with drawn texts. draws: those that were judged.
    """

    endpoint: Endpoint
    prompts: Sequence[str | Messages]
    plan: Plan
    num_top: int = 0
    tells: Literal["raw", "warped"] = "raw"
    samples: int = 1
    extras: dict[str, Any] = field(default_factory=dict)
    greedy: list[Reply] = field(default_factory=list)
    laws: Laws = field(default_factory=Laws)
    draws: list[Draw] = field(default_factory=list)

    @property
    def few(self) -> range:
        """The prompts of tests that ask many things of each."""
        return range(min(FEW, len(self.prompts)))

    def ask(self, prompt: int, **fields: Any) -> Ask:
        """A question about a prompt by number; greedy, with log-probabilities, unless said otherwise."""
        most = {"temperature": 0, "max_tokens": self.plan.max_tokens}
        tops = {"logprobs": self.num_top} if self.num_top else {}
        return Ask(self.prompts[prompt], {**most, **tops, **fields})


async def meet(endpoint: Endpoint, prompts: Sequence[str | Messages], plan: Plan) -> Subject:
    """Ask what the server can tell, and for its greedy texts.

    Raises:
        ConfigError: it serves no model, or fails at the plainest question.
    """
    await endpoint.connect()
    try:
        return await _meet(Subject(endpoint, prompts, plan))
    except Broken as error:
        remedy = error.remedy[0].lower() + error.remedy[1:].rstrip(".")
        raise ConfigError(f"{endpoint.url} fails at the plainest question ({error}): {remedy}") from error


async def _meet(subject: Subject) -> Subject:
    endpoint, prompts = subject.endpoint, subject.prompts
    try:
        await endpoint.ask(subject.ask(0, max_tokens=1))
    except Refused as error:
        if endpoint.route == "completions" or not all(isinstance(prompt, str) for prompt in prompts):
            raise ConfigError(f"{endpoint.url} refuses a greedy token: {error}") from error
        endpoint.route = "completions"  # a base model has no chat template
        try:
            await endpoint.ask(subject.ask(0, max_tokens=1))
        except Refused as second:
            raise ConfigError(f"{endpoint.url} takes neither chats ({error}) nor completions ({second})") from second
    for num_top in TOPS:
        reply = await _answer(subject, logprobs=num_top, max_tokens=1)
        if reply is not None and reply.only.rows and reply.only.rows[0].top:
            subject.num_top = num_top
            break
    if await _answer(subject, max_tokens=1, ignore_eos=True) is not None:
        subject.extras = {"ignore_eos": True}
    several = await _answer(subject, max_tokens=1, n=8, temperature=1)
    subject.samples = 8 if several is not None and len(several.samples) == 8 else 1
    subject.tells = await _telling(subject)
    subject.greedy = [await endpoint.ask(subject.ask(number)) for number in range(len(prompts))]
    if not any(reply.samples and reply.only.text for reply in subject.greedy):
        raise ConfigError(f"{endpoint.url} says nothing to any prompt: give other ones by --prompts")
    return subject


async def _answer(subject: Subject, **fields: Any) -> Reply | None:
    try:
        reply = await subject.endpoint.ask(subject.ask(0, **fields))
    except Refused:
        return None
    return reply if reply.samples else None


async def _telling(subject: Subject) -> Literal["raw", "warped"]:
    """Do log-probabilities change with the temperature as the law does?"""
    if not subject.num_top:
        return "raw"
    own, cool = [
        (await subject.endpoint.ask(subject.ask(0, temperature=temperature, max_tokens=1))).only
        for temperature in (1.0, 0.5)
    ]
    if not own.rows or not cool.rows:
        return "raw"
    raw, seen = told(own.rows[0].top), told(cool.rows[0].top)
    asked = warped(raw, Fields(temperature=0.5))
    assert asked is not None  # below 1 there always is one
    return "warped" if apart(asked, seen) + 1e-3 < apart(raw, seen) else "raw"


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two texts part.

    Attributes:
        prompt: its number. position: of the first token that differs, or of the character where no tokens are told.
        expected, found: what stands there (None: the text had ended). margin: log-probability of the likeliest token
            less that of the second, as told with the expected text; None where it was not told.
    """

    prompt: int
    position: int
    expected: str | None
    found: str | None
    margin: float | None

    def __str__(self) -> str:
        margin = "" if self.margin is None else f" (margin {self.margin:.4f})"
        return f"prompt {self.prompt}, position {self.position}: {self.found!r} for {self.expected!r}{margin}"


def difference(prompt: int, expected: Sample, found: Sample) -> Difference | None:
    """The first one; how a text ended counts as well."""
    by_token = bool(expected.rows and found.rows)
    a, b = (expected.tokens, found.tokens) if by_token else (expected.text, found.text)
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if place == len(a) == len(b):
        if expected.text == found.text and expected.finish == found.finish:
            return None
        return Difference(prompt, place, f"the end by {expected.finish}", f"the end by {found.finish}", None)
    at = [text[place] if place < len(text) else None for text in (a, b)]
    margin = margin_of(expected, place) if by_token and place < len(a) else None
    return Difference(prompt, place, at[0], at[1], margin)


def margin_of(sample: Sample, position: int) -> float | None:
    best, *others = sorted(sample.rows[position].top.values(), reverse=True)[:2] or [math.nan]
    return best - others[0] if others else None


def outcome(name: str, problems: Sequence[Any], count: int, held: str, remedy: str) -> Finding:
    """A finding of a test that compares: what was wrong first, or that nothing was."""
    if not count:
        return Finding(name, "untested", "nothing could be compared", remedy="give longer texts by --max-tokens")
    if not problems:
        return Finding(name, "held", f"{held} ({count} compared)", count=count)
    more = f" (and {len(problems) - 1} more of {count})" if len(problems) > 1 else ""
    return Finding(name, "broken", f"{problems[0]}{more}", remedy, count, evidence={"first": str(problems[0])})
