"""The same answer in other shapes: streamed, seeded, several choices; and fields whose effect is plain to see."""

from __future__ import annotations

import math

from outrider.measure.endpoint.answers import Refused, Reply, Sample
from outrider.measure.endpoint.findings import Finding
from outrider.measure.endpoint.subject import Subject, difference, outcome

SEEDS = 8
UNLIKELY = 1e-6
"""Samples are too much alike if chance makes them so less often than this."""
BIASED = (65, 66, 70, 80, 100, 150, 200, 300, 500, 1000)
"""Token ids that are tried; what they stand for is seen from what is said."""
BIAS = 100
REPETITION = 1.8


async def streams(subject: Subject) -> Finding:
    """Greedy and seeded answers, whole and as a stream."""
    asks = [subject.ask(number) for number in subject.few]
    asks += [subject.ask(number, temperature=1, seed=subject.plan.seed + number) for number in subject.few]
    whole, streamed = await subject.endpoint.ask_all(asks), await subject.endpoint.stream_all(asks)
    again = await subject.endpoint.ask_all(asks)
    problems, count = [], 0
    for index, (reply, stream, repeat) in enumerate(zip(whole, streamed, again, strict=True)):
        if difference(index, reply.only, repeat.only) is not None:
            continue  # what does not repeat itself is the business of other tests
        count += 1
        number = index % len(subject.few)
        if not stream.samples:
            problems.append(f"prompt {number}: the stream says nothing")
            continue
        parted = difference(number, reply.only, stream.only)
        if parted is not None:
            problems.append(str(parted))
        elif stream.only.ends != 1:
            problems.append(f"prompt {number}: the stream tells {stream.only.ends} finish reasons")
        elif stream.usage is None or stream.usage["completion_tokens"] != (reply.usage or {}).get("completion_tokens"):
            problems.append(f"prompt {number}: the stream tells other usage")
    return outcome(
        "stream",
        problems,
        count,
        "streams put together are the answers that are whole",
        "Every token of a cycle must reach the stream, bursts and the last one with its finish reason included, "
        "whatever is held back for stop strings and unfinished characters.",
    )


async def seeds(subject: Subject) -> Finding:
    """One seed twice, alone and in company; and several."""
    asks = [
        subject.ask(number, temperature=1, seed=subject.plan.seed + seed)
        for number in range(min(2, len(subject.prompts)))
        for seed in range(SEEDS)
    ]
    alone = [await subject.endpoint.ask(ask) for ask in asks[::4]]
    company = await subject.endpoint.ask_all(asks)
    problems = [str(d) for a, b in zip(alone, company[::4], strict=True) if (d := difference(0, a.only, b.only))]
    for start in range(0, len(asks), SEEDS):
        if _too_alike([reply.only for reply in company[start : start + SEEDS]]):
            problems.append(f"{SEEDS} seeds gave one text: {company[start].only.text[:40]!r}")
    return outcome(
        "seed",
        problems,
        len(alone) + len(asks),
        "one seed gives one text, several give several",
        "Draws must depend on the request's seed and on nothing else of the moment: not on the neighbours, not on how "
        "many guesses were made before.",
    )


async def choices(subject: Subject) -> Finding:
    """Several choices of one request."""
    if subject.samples == 1:
        return Finding("n", "refused", "only one choice a request")
    problems, count = [], 0
    for number in range(min(3, len(subject.prompts))):
        greedy = await subject.endpoint.ask(subject.ask(number, n=3))
        drawn = await subject.endpoint.ask(subject.ask(number, n=4, temperature=1, seed=subject.plan.seed))
        count += 2
        if (len(greedy.samples), len(drawn.samples)) != (3, 4):
            problems.append(f"prompt {number}: {len(greedy.samples)} and {len(drawn.samples)} choices for 3 and 4")
        problems += [str(d) for s in greedy.samples if (d := difference(number, subject.greedy[number].only, s))]
        if _too_alike(drawn.samples):
            problems.append(f"prompt {number}: 4 choices at temperature 1 are one text: {drawn.only.text[:40]!r}")
    return outcome(
        "n",
        problems,
        count,
        "as many choices as asked, greedy ones alike, drawn ones not",
        "Each choice needs noise of its own at temperature 1, and none at 0.",
    )


def _too_alike(samples: list[Sample]) -> bool:
    """Are all texts one, though that is next to impossible by their own log-probabilities?"""
    if len(samples) < 2 or any(sample.text != samples[0].text for sample in samples):
        return False
    likely = sum(row.logprob for row in samples[0].rows)
    return likely * (len(samples) - 1) < math.log(UNLIKELY)


async def logprobs(subject: Subject) -> Finding:
    """What is told beside a text changes nothing, and is a law."""
    if not subject.num_top:
        return Finding("logprobs", "refused", "none are told")
    problems = []
    for number, told in enumerate(subject.greedy):
        ask = subject.ask(number)
        ask.fields.pop("logprobs")
        plain = await subject.endpoint.ask(ask)
        if plain.only.text != told.only.text:
            problems.append(f"prompt {number}: asking for log-probabilities changes the text")
        problems += [f"prompt {number}, position {place}: {wrong}" for place, wrong in _no_laws(told)]
    return outcome(
        "logprobs",
        problems,
        len(subject.greedy),
        "asking for them changes no text, and they are laws",
        "Each delivered token needs the row it was drawn from: see which of a tree's rows is told.",
    )


def _no_laws(reply: Reply) -> list[tuple[int, str]]:
    found = []
    for place, row in enumerate(reply.only.rows):
        mass = sum(math.exp(value) for value in row.top.values())
        if mass > 1 + 1e-3 or row.logprob > 1e-6:
            found.append((place, f"chances add up to {mass:.4f}"))
        elif row.token in row.top and abs(row.top[row.token] - row.logprob) > 1e-3:
            found.append((place, f"{row.token!r} is told twice, with two figures"))
    return found


async def bias(subject: Subject) -> Finding:
    """Tokens that a bias forces are all that is said."""
    name, said = "logit_bias", dict[int, str]()
    problems, count, refusal = [], 0, ""
    for token in BIASED:
        ask = subject.ask(0, temperature=1, max_tokens=8, logit_bias={str(token): BIAS}, **subject.extras)
        try:
            sample = (await subject.endpoint.ask(ask)).only
        except Refused as error:
            refusal = str(error)
            continue
        if sample.finish == "stop" or not sample.rows:
            continue  # the end of text, or nothing that can be told apart
        count += 1
        if len(set(sample.tokens)) > 1:
            problems.append(f"token {token} has a bias of {BIAS}, and others are said: {sample.tokens}")
        said[token] = sample.tokens[0]
        if len(said) == 3:
            break
    if not count:
        return Finding(name, "refused" if refusal else "untested", refusal or "no token could be forced")
    pair = dict(list(said.items())[:2])
    both = {str(token): BIAS for token in pair}
    sample = (await subject.endpoint.ask(subject.ask(0, max_tokens=16, logit_bias=both, **subject.extras))).only
    if not set(sample.tokens) <= set(pair.values()):
        problems.append(f"tokens {[*pair]} have a bias of {BIAS}, and others are said: {sample.tokens}")
    remedy = "The bias must be added at every position, those of guesses included."
    return outcome(name, problems, count + 1, "biased tokens are all that is said", remedy)


async def repetition(subject: Subject) -> Finding:
    """A strong repetition penalty changes some greedy text that repeats itself."""
    name = "repetition_penalty"
    numbers = [n for n, reply in enumerate(subject.greedy) if len(set(reply.only.tokens)) < len(reply.only.tokens)]
    if not numbers:
        return Finding(name, "untested", "no text repeats a token")
    replies = await subject.endpoint.ask_all([subject.ask(number, **{name: REPETITION}) for number in numbers])
    same = all(reply.only.text == subject.greedy[n].only.text for n, reply in zip(numbers, replies, strict=True))
    problems = [f"at {REPETITION} no greedy text changes, of {len(numbers)} that repeat tokens"] if same else []
    return outcome(
        name, problems, len(numbers), "it has an effect", "The field is taken and ignored: honour or refuse it."
    )
