"""Greedy texts: the same alone, in company, read anew and at a reference; each token the likeliest of its law."""

from __future__ import annotations

import random
from typing import Any

from outrider.measure.endpoint.answers import Refused, Reply, Sample
from outrider.measure.endpoint.client import Ask
from outrider.measure.endpoint.findings import Finding
from outrider.measure.endpoint.laws import LAW_SLACK, apart, told
from outrider.measure.endpoint.subject import Difference, Subject, difference, outcome

ROUNDING = 0.01
"""Nats by which a token may fall short of the likeliest: servers tell rounded figures."""
COPIES = 3
PENALTY = 1.5


async def together(subject: Subject) -> Finding:
    """Several copies of all prompts at once."""
    numbers = [number for number in range(len(subject.prompts)) for _ in range(COPIES)]
    random.Random(subject.plan.seed).shuffle(numbers)
    replies = await subject.endpoint.ask_all([subject.ask(number) for number in numbers])
    found = [
        difference(number, subject.greedy[number].only, reply.only)
        for number, reply in zip(numbers, replies, strict=True)
    ]
    return _judged(
        subject,
        "greedy: in company",
        found,
        "a text does not depend on its neighbours",
        "A row of a pass depends on its neighbours: by rounding where the margin is tiny (--tie passes those), by "
        "mixed-up keys and values where it is wide.",
    )


async def against(subject: Subject, reference: Subject) -> Finding:
    """Every prompt at both servers."""
    found = [
        difference(number, expected.only, reply.only)
        for number, (expected, reply) in enumerate(zip(reference.greedy, subject.greedy, strict=True))
    ]
    return _judged(
        subject,
        "greedy: against the reference",
        found,
        "both servers say the same",
        "Verification keeps a token that the target would not say. A tiny margin points to rounding (--tie passes "
        "those), a wide one to the keys after a rejected guess.",
    )


def _judged(subject: Subject, name: str, found: list[Difference | None], held: str, remedy: str) -> Finding:
    parted = [each for each in found if each is not None]
    wide = [each for each in parted if each.margin is None or each.margin > subject.plan.tie]
    if len(wide) < len(parted):
        held += f"; {len(parted) - len(wide)} parted at ties"
    return outcome(name, wide, len(found), held, remedy)


async def likeliest(subject: Subject) -> Finding:
    """Every greedy token against the law that is told with it."""
    problems, count = _short_of_best(subject.greedy, 0.0, 0.0)
    return outcome(
        "greedy: the likeliest token",
        problems,
        count,
        "each token is the likeliest of its law",
        "A greedy token is not the likeliest one of the law told with it: look at how guesses are accepted at "
        "temperature 0, and whether log-probabilities belong to the right row.",
    )


async def penalised(subject: Subject, name: str) -> Finding:
    """Greedy texts under a penalty against the penalised laws."""
    title = f"{name}: greedy"
    if subject.tells == "warped":
        return Finding(title, "untested", "log-probabilities are told after the penalties: give --reference")
    asks = [subject.ask(number, **{name: PENALTY}, **subject.extras) for number in range(len(subject.prompts))]
    replies = await subject.endpoint.ask_all(asks)
    penalties = (PENALTY, 0.0) if name == "frequency_penalty" else (0.0, PENALTY)
    problems, count = _short_of_best(replies, *penalties)
    return outcome(
        title,
        problems,
        count,
        "each token is the likeliest of the penalised law",
        "The penalty does not count every token said so far: within a cycle each guess must be penalised by the "
        "guesses before it, and all delivered tokens be counted afterwards.",
    )


def _short_of_best(replies: list[Reply], frequency: float, presence: float) -> tuple[list[str], int]:
    problems, count = [], 0
    for number, reply in enumerate(replies):
        said: dict[str, int] = {}
        for place, row in enumerate(reply.only.rows):

            def score(token: str, logprob: float, said: dict[str, int] = said) -> float:
                return logprob - said.get(token, 0) * frequency - (token in said) * presence

            best = max(row.top, key=lambda token: score(token, row.top[token]), default=row.token)
            short = score(best, row.top.get(best, row.logprob)) - score(row.token, row.logprob)
            if short > ROUNDING:
                problems.append(
                    f"prompt {number}, position {place}: {row.token!r} falls {short:.3f} nats short of {best!r}"
                )
            said[row.token] = said.get(row.token, 0) + 1
            count += 1
    return problems, count


async def reread(subject: Subject) -> Finding:
    """Greedy completions, then the same texts as prompts: the laws after each prefix, with no guess in between."""
    name = "greedy: read anew"
    endpoint, texts = subject.endpoint, [text_of(prompt) for prompt in subject.prompts]
    common: dict[str, Any] = {"temperature": 0, "logprobs": min(subject.num_top, 5)}
    problems, count, strange = [], 0, 0
    try:
        wanted = {**common, "max_tokens": subject.plan.max_tokens}
        written = await endpoint.ask_all([Ask(text, wanted) for text in texts], "completions")
        asks = [
            Ask(text + reply.only.text, {**common, "max_tokens": 1, "echo": True})
            for text, reply in zip(texts, written, strict=True)
        ]
        read = await endpoint.ask_all(asks, "completions")
    except Refused as error:
        return Finding(name, "untested", f"completions do not echo with log-probabilities here ({error})")
    for number, (first, second) in enumerate(zip(written, read, strict=True)):
        pairs = _aligned(first.only, second)
        strange += not pairs
        for place, (a, b) in enumerate(pairs):
            shift = apart(told(a.top), told(b.top))
            count += 1
            if shift > LAW_SLACK:
                problems.append(f"prompt {number}, position {place}: a chance is {shift:.3f} off")
                break
    if not count:
        return Finding(name, "untested", "no text reads back as the tokens that made it")
    return outcome(
        name,
        problems,
        count,
        f"the same laws as after reading; {strange} texts read back otherwise" if strange else "the same laws",
        "The law while writing is not that after reading the same text: keys and values of a rejected guess are left "
        "over, or a position is off by one.",
    )


def _aligned(written: Sample, read: Reply) -> list[tuple[Any, Any]]:
    """Rows of a completion beside those of its echo; none where the text became other tokens."""
    prompt_tokens = (read.usage or {}).get("prompt_tokens", 0)
    for kept in (written.rows, written.rows[:-1]):  # an end token is not in the text
        echoed = read.only.rows[:prompt_tokens][-len(kept) :] if kept else []
        if kept and [row.token for row in echoed] == [row.token for row in kept]:
            return list(zip(kept, echoed, strict=True))
    return []


def text_of(prompt: Any) -> str:
    """A prompt as one text."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
