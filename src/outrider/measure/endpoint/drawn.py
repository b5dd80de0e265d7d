"""Laws of drawn texts: every token against what the fields make of the law told with it, and two servers' draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.measure.endpoint.answers import Reply
from outrider.measure.endpoint.findings import Finding
from outrider.measure.endpoint.laws import LAW_SLACK, Fields, apart, told, warped
from outrider.measure.endpoint.plan import Plan
from outrider.measure.endpoint.statistics import (
    ALPHA,
    POWER,
    RANKS,
    Draw,
    by_rank,
    distance,
    least_seen,
    martingale,
    serial,
    shared_laws,
    two_samples,
)
from outrider.measure.endpoint.subject import Subject, outcome

PROMPTS = 4
DOUBT = 2e-3
"""A law that can be more than this off, for what nobody tells of the tail, is not judged by."""
OFFSET = 1_000_003
"""Between the seeds of two servers, whose draws must not be the same."""
STRIDE = 10_007
"""Between the seeds of two trials."""
NUM_TESTS = 30
"""About as many p-values as a check has."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Draws under some fields: the body's, and the law that they ask for (None: it takes a reference to tell)."""

    name: str
    body: dict[str, Any]
    fields: Fields | None
    seeded: bool = True


TRIALS = (
    Trial("temperature 1", {}, Fields()),
    Trial("no seed", {}, Fields(), seeded=False),
    Trial("temperature", {"temperature": 0.6}, Fields(temperature=0.6)),
    Trial("top_p", {"top_p": 0.7}, Fields(top_p=0.7)),
    Trial("top_k", {"top_k": 3}, Fields(top_k=3)),
    Trial("min_p", {"min_p": 0.15}, Fields(min_p=0.15)),
    Trial("frequency_penalty", {"frequency_penalty": 1.2}, Fields(frequency_penalty=1.2)),
    Trial("presence_penalty", {"presence_penalty": 1.2}, Fields(presence_penalty=1.2)),
    Trial("repetition_penalty", {"repetition_penalty": 1.3}, None),
)


async def drawn(subject: Subject, trial: Trial, reference: Subject | None = None) -> Finding:
    """One trial's draws, judged by the laws told with them, and beside a reference's draws."""
    name = f"{trial.name}: law"
    replies = await _ask(subject, trial, 0)
    reasons = []
    ps, counted, said = dict[str, float](), 0, list[str]()
    found = None
    if trial.fields is None or not subject.num_top:
        reasons.append("no law is told for it")
    elif subject.tells == "warped" and trial.fields not in (Fields(), Fields(temperature=trial.fields.temperature)):
        reasons.append("log-probabilities are told after the fields")
    else:
        texts = _draws(replies, trial.fields, subject)
        draws = [draw for text in texts for draw in text]
        forbidden = [draw for draw in draws if draw.is_forbidden]
        if forbidden:
            return _impossible(name, trial, forbidden, len(draws))
        shared, rest = shared_laws(draws)
        scores = {
            "tokens": shared,
            "ranks": martingale(map(by_rank, rest)),
            "neighbours": serial(texts, subject.plan.seed),
        }
        ps = {kind: score.p for kind, score in scores.items() if score.df}
        counted, found = len(draws), distance(draws)
        subject.draws += draws
        if found is not None:
            bounds = f"{found.low:.3f} to {found.high:.3f}"
            said.append(f"{counted} draws, total variation {found.measured:.3f} (within {bounds})")
        if not ps:
            reasons.append(f"the {subject.num_top} likeliest tokens do not decide it")
    if reference is not None:
        others = await _ask(reference, trial, OFFSET)
        _draws(others, Fields(), reference)
        score = two_samples(_tokens(replies, subject), _tokens(others, reference))
        if score.df:
            ps["draws beside the reference's"] = score.p
            said.append(f"{score.draws} draws of both servers")
            counted = counted or score.draws
        reasons = [] if ps else [*reasons, "no history is common enough at both servers"]
    if not ps:
        return Finding(name, "untested", "; ".join(reasons), remedy="give --reference, or more --draws")
    return Finding(name, "held", "; ".join(said), _remedy(trial), counted, ps, found)


def _impossible(name: str, trial: Trial, forbidden: Sequence[Draw], count: int) -> Finding:
    said = f"{len(forbidden)} of {count} tokens cannot be drawn under {trial.body}, such as {forbidden[0].token!r}"
    return Finding(name, "broken", said, _remedy(trial), count, distance=distance(forbidden))


def _remedy(trial: Trial) -> str:
    asked = ", ".join(f"{key}={value}" for key, value in trial.body.items()) or "temperature 1"
    return (
        f"Draws under {asked} do not follow the law: compare with speculation off. If that is right, look at the "
        "residual after a rejection, at noise that is used twice, and whether the field reaches every guess."
    )


async def _ask(subject: Subject, trial: Trial, offset: int) -> list[tuple[int, Reply]]:
    """(prompt, reply) of each request.

    Raises:
        Refused: the server does not take the fields.
    """
    prompts = min(PROMPTS, len(subject.prompts))
    body = {"temperature": 1, "max_tokens": subject.plan.draw_tokens, **trial.body, **subject.extras}
    if subject.samples > 1:
        body["n"] = subject.samples
    first_seed = subject.plan.seed + offset + TRIALS.index(trial) * STRIDE  # trials are pooled: no two share noise
    asks = []
    for index in range(-(-subject.plan.draws // subject.samples)):
        seed = {"seed": first_seed + index} if trial.seeded else {}
        asks.append((index % prompts, subject.ask(index % prompts, **body, **seed)))
    first = await subject.endpoint.ask(asks[0][1])  # a refusal comes before the crowd
    rest = await subject.endpoint.ask_all([ask for _, ask in asks[1:]])
    return [(number, reply) for (number, _), reply in zip(asks, [first, *rest], strict=True)]


def _draws(replies: Sequence[tuple[int, Reply]], fields: Fields, subject: Subject) -> list[list[Draw]]:
    """The draws of each text whose laws are known, up to the first of which the law is not."""
    texts = []
    unseen = _unseen_ends(replies, subject)
    for number, reply in replies:
        for sample in reply.samples:
            text, tokens = [], sample.tokens
            for place, row in enumerate(sample.rows):
                history = (number, tokens[:place])
                if history in unseen:
                    continue
                own = told(row.top)
                subject.laws.add(history, own)
                law = warped(own, fields, tokens[:place]) if subject.tells == "raw" else own
                if law is not None and law.doubt <= DOUBT:
                    text.append(Draw(history, row.token, law))
            texts.append(text)
    return texts


def _unseen_ends(replies: Sequence[tuple[int, Reply]], subject: Subject) -> set[Any]:
    """Histories behind which some text ended by a token that is not told: what was drawn there is not known."""
    if subject.extras:
        return set()
    return {
        (number, sample.tokens)
        for number, reply in replies
        for sample in reply.samples
        if sample.finish == "stop" and len(sample.rows) < subject.plan.draw_tokens
    }


def _tokens(replies: Sequence[tuple[int, Reply]], subject: Subject) -> Iterator[tuple[Any, str]]:
    """(history, token) of every draw; of servers that tell no tokens, the whole text as one."""
    for number, reply in replies:
        for sample in reply.samples:
            if not subject.num_top:
                yield number, sample.text
            for place, token in enumerate(sample.tokens):
                yield (number, sample.tokens[:place]), token


def pooled(subject: Subject) -> Finding:
    """All trials' draws together: by token, by token behind the one before it, and by token behind its history."""
    name, draws = "all laws together", subject.draws
    if not draws:
        return Finding(name, "untested", "no law was judged")
    scores = {
        "tokens": martingale(draws),
        "tokens behind each token": martingale(draws, lambda draw: draw.history[1][-1:]),
        "tokens behind each text": martingale(draws, lambda draw: draw.history),
        "ranks": martingale(map(by_rank, draws)),
    }
    found = distance(draws)
    assert found is not None
    return Finding(
        name,
        "held",
        f"{len(draws)} draws, total variation {found.measured:.3f} (within {found.low:.3f} to {found.high:.3f})",
        "Draws do not follow their laws, whatever the fields: look at the residual after a rejection, and at noise "
        "that is used twice (for a guess and its acceptance, for two choices).",
        len(draws),
        {kind: score.p for kind, score in scores.items() if score.df},
        found,
    )


def one_law(subject: Subject) -> Finding:
    """The laws told over all trials: one history has one law."""
    if subject.tells == "warped":
        return Finding("logprobs: one history, one law", "untested", "log-probabilities are told after the fields")
    return outcome(
        "logprobs: one history, one law",
        subject.laws.problems,
        subject.laws.repeated,
        "laws do not depend on how a text came about",
        "After the same tokens the law was another one: keys and values of a rejected guess are left over, or a "
        "position is off by one.",
    )


def compared(subject: Subject, reference: Subject) -> Finding:
    """The laws of two servers after the same histories."""
    name = "logprobs: against the reference"
    if "warped" in (subject.tells, reference.tells):
        return Finding(name, "untested", "log-probabilities are told after the fields")
    ours, others = subject.laws.seen, reference.laws.seen
    shifts = {history: apart(ours[history], others[history]) for history in ours.keys() & others.keys()}
    wide = sorted((h for h in shifts if shifts[h] > LAW_SLACK), key=lambda h: (h[0], len(h[1]), h[1]))
    problems = [f"prompt {h[0]}, behind {''.join(h[1][-5:])!r}: a chance is {shifts[h]:.3f} off" for h in wide]
    return outcome(
        name,
        problems,
        len(shifts),
        f"laws are the same to {max(shifts.values(), default=0.0):.2g}",
        "The two servers do not compute one law: other weights or precision, or keys and values that are left over.",
    )


def power(plan: Plan, num_top: int) -> str:
    """What the draws can see, said before any is made."""
    if not num_top:
        return "no log-probabilities are told: laws are judged beside a reference only"
    all_tokens, first = plan.draws * plan.draw_tokens, max(1, plan.draws // PROMPTS)
    ranks = least_seen(all_tokens, len(RANKS) - 1, NUM_TESTS)
    one = least_seen(first, 10, NUM_TESTS)
    together = least_seen(all_tokens * sum(trial.fields is not None for trial in TRIALS), 100, NUM_TESTS)
    return (
        f"{plan.draws} texts of {plan.draw_tokens} tokens for each field: with {POWER:.0%} at least, a shift is "
        f"found of {ranks:.3f} in total variation among a field's ranks, of {one:.2f} in a law that {first} texts "
        f"share, and of {together:.3f} among the tokens of all fields; a sound server is accused in {ALPHA:.1%} of "
        "checks at most"
    )
