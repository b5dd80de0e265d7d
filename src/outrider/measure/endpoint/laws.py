"""The law a field asks for, worked out from what a server tells of the model's own: the likeliest tokens' chances."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EDGE = 2e-3
"""A token this near to a cut (relative) may fall on either side of it by rounding: such a law is not judged by."""

LAW_SLACK = 0.05
"""Largest difference of a chance that rounding may make between two readings of one text, in bfloat16 say."""


@dataclass(frozen=True, slots=True)
class Law:
    """Chances of the next token.

    Attributes:
        known: by token, likeliest first. tail: mass of all others. doubt: the most that this law can be off by, in
            total variation, as nobody told how the tail is made up.
    """

    known: Mapping[str, float]
    tail: float
    doubt: float = 0.0

    def of(self, token: str) -> float:
        """Its chance; of one that is not known, the whole tail's."""
        return self.known.get(token, self.tail)


@dataclass(frozen=True, slots=True)
class Fields:
    """The sampling fields that make a law of the model's own; each at the value that changes nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


def told(top: Mapping[str, float]) -> Law:
    """The model's own law, from log-probabilities of its likeliest tokens."""
    ranked = sorted(top.items(), key=lambda item: -item[1])
    known = {token: math.exp(min(logprob, 0.0)) for token, logprob in ranked}
    tail = 1.0 - sum(known.values())
    return Law(known, tail if tail > 1e-6 else 0.0)


def warped(law: Law, fields: Fields, history: Sequence[str] = ()) -> Law | None:
    """The law that the fields ask for, penalties first, then temperature, then top-k, top-p and min-p.

    Args:
        history: the completion's tokens so far.

    Returns:
        None where the likeliest tokens do not decide it: a cut lies beyond them, or on an edge.
    """
    counts = Counter(history)
    weights = {
        token: chance * math.exp(-_penalty(counts[token], fields)) for token, chance in law.known.items() if chance > 0
    }
    least = min(law.known.values(), default=0.0)
    tail = law.tail
    said = {token for token in counts if token not in law.known}
    penalised = min(tail, least * len(said)) if fields.frequency_penalty or fields.presence_penalty else 0.0
    loose = penalised  # how much of the tail may not be there, or be more
    if penalised and min(fields.frequency_penalty, fields.presence_penalty) < 0:
        return None
    if fields.temperature != 1.0:
        if tail and fields.temperature > 1:
            return None
        power = 1 / fields.temperature
        weights = {token: weight**power for token, weight in weights.items()}
        # Each of the tail's tokens is at most as likely as the least known one.
        tail = loose = tail * least ** (power - 1)
        least = least**power
    return _cut(_ranked(weights), tail, loose, least, fields)


def _penalty(count: int, fields: Fields) -> float:
    return count * fields.frequency_penalty + (count > 0) * fields.presence_penalty


def _ranked(weights: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(weights.items(), key=lambda item: -item[1])


def _cut(ranked: list[tuple[str, float]], tail: float, loose: float, least: float, fields: Fields) -> Law | None:
    """Truncate a ranking: each cut keeps a beginning of it, and needs to be seen from both sides."""
    keep = len(ranked)
    weights = [weight for _, weight in ranked]
    total = sum(weights) + tail
    if not total:
        return None  # chances so small that their powers are none
    cuts = []
    if fields.top_k and (tail or fields.top_k < keep):
        if fields.top_k > keep or _near(weights[fields.top_k - 1], [*weights[fields.top_k :], least][0]):
            return None
        cuts.append(fields.top_k)
    if fields.top_p < 1:
        mass = 0.0
        for count, weight in enumerate(weights, start=1):
            mass += weight / total
            if abs(mass - fields.top_p) < EDGE or (mass < fields.top_p and count == keep and tail):
                return None
            if mass > fields.top_p:
                cuts.append(count)
                break
    if fields.min_p > 0:
        bar = fields.min_p * weights[0]
        if any(_near(weight, bar) for weight in weights) or (tail and least > bar):
            return None
        cuts.append(sum(weight > bar for weight in weights))
    if cuts:
        ranked, tail, loose = ranked[: min(cuts)], 0.0, 0.0
    total = sum(weight for _, weight in ranked) + tail
    return Law({token: weight / total for token, weight in ranked}, tail / total, loose / total)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= EDGE * max(a, b)


def apart(a: Law, b: Law) -> float:
    """Largest difference of a chance, over tokens that both tell of."""
    return max((abs(a.known[token] - b.known[token]) for token in a.known.keys() & b.known.keys()), default=1.0)


@dataclass(slots=True)
class Laws:
    """The laws told after each history (a prompt's number and the tokens since): one history has one law.

    Attributes:
        repeated: how often a history was met again. problems: where its law was another one then.
    """

    seen: dict[tuple[int, tuple[str, ...]], Law] = field(default_factory=dict)
    repeated: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, history: tuple[int, tuple[str, ...]], law: Law) -> None:
        before = self.seen.setdefault(history, law)
        if before is not law:
            self.repeated += 1
            shift = apart(before, law)
            if shift > LAW_SLACK:
                said = "".join(history[1][-5:])
                self.problems.append(f"prompt {history[0]}, behind {said!r}: a chance is {shift:.3f} off")
