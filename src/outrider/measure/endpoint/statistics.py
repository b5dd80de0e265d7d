"""Do draws follow their laws? G-tests where many share one, martingale tests where few do, and what they can see."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from outrider.measure.endpoint.laws import Law

ALPHA = 1e-3
"""Chance that a sound server is accused, by any of one check's tests."""
LEAST_EXPECTED = 10.0
"""Of a cell: fewer are pooled, since a G statistic's tail is not chi-square's there."""
LAST_RANKS = (1, 2, 3, 5, 10, 10_000)
RANKS = ("1", "2", "3", "4 to 5", "6 to 10", "others", "tail")
"""Cells of ranks, and where they end; the tail that nobody tells of is the last one."""
POWER = 0.9


History: TypeAlias = tuple[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Draw:
    """One token that was drawn, after a history (the prompt's number and the tokens since), and the law there."""

    history: History
    token: str
    law: Law

    @property
    def is_forbidden(self) -> bool:
        return self.law.of(self.token) == 0 and self.law.doubt == 0


@dataclass(frozen=True, slots=True)
class Score:
    """A statistic that is chi-square with `df` degrees of freedom if all is well; over so many draws."""

    statistic: float
    df: int
    draws: int

    @property
    def p(self) -> float:
        from scipy.stats import chi2

        return float(chi2.sf(self.statistic, self.df)) if self.df else 1.0


def shared_laws(draws: Iterable[Draw]) -> tuple[Score, list[Draw]]:
    """G-test (log-likelihood ratio) over all histories that were met often enough; and the draws that were left over.

    Which histories are met often does not depend on what follows them, so that the statistics add up.
    """
    groups: dict[Hashable, list[Draw]] = defaultdict(list)
    for draw in draws:
        groups[draw.history].append(draw)
    total, df, used, rest = 0.0, 0, 0, list[Draw]()
    for group in groups.values():
        tokens, expected = _cells(group[0].law, len(group))
        if not tokens:
            rest += group
            continue
        counts = Counter(draw.token for draw in group)
        named = [counts[token] for token in tokens]
        total += _g(np.array([*named, len(group) - sum(named)], float), np.array(expected))
        df += len(tokens)
        used += len(group)
    return Score(total, df, used), rest


def _cells(law: Law, count: int) -> tuple[list[str], list[float]]:
    """The tokens that are likely enough to be counted by themselves; what each expects, and all others together."""
    named = {token: chance * count for token, chance in law.known.items() if chance * count >= LEAST_EXPECTED}
    others = count - sum(named.values())
    while named and others < LEAST_EXPECTED:
        others += named.popitem()[1]
    return list(named), [*named.values(), others]


def _g(observed: np.ndarray, expected: np.ndarray) -> float:
    from scipy.stats import power_divergence

    scaled = expected * (observed.sum() / expected.sum())
    return float(power_divergence(observed, scaled, lambda_="log-likelihood").statistic)


def martingale(draws: Iterable[Draw], group: Callable[[Draw], Hashable] = lambda draw: None) -> Score:
    """How often each token was drawn, against the sum of its chances, each draw with its own law; group by group.

    Observed less expected is a martingale whatever the laws depend on, and its covariance is the sum of the laws' own
    (a multinomial's would be too wide, and blind). `group` may look at what came before a draw, never at its token.
    """
    groups: dict[Hashable, list[Draw]] = defaultdict(list)
    for draw in draws:
        groups[group(draw)].append(draw)
    total, df, used = 0.0, 0, 0
    for members in groups.values():
        cells = _likely(members)
        if cells:
            difference, covariance = _sums(members, cells)
            total += float(difference @ np.linalg.pinv(covariance, hermitian=True) @ difference)
            df += len(cells)
            used += len(members)
    return Score(total, df, used)


def _likely(draws: Sequence[Draw]) -> dict[str, int]:
    """Cells of the tokens that are expected often enough, so that all others together are too."""
    expected: Counter[str] = Counter()
    for draw in draws:
        expected.update(draw.law.known)
    named = [token for token, count in expected.most_common() if count >= LEAST_EXPECTED]
    others = len(draws) - sum(expected[token] for token in named)
    while named and others < LEAST_EXPECTED:
        others += expected[named.pop()]
    return {token: cell for cell, token in enumerate(named)}


def _sums(draws: Iterable[Draw], cells: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Observed less expected counts of the cells, (C,), and their covariance, (C, C); both float64."""
    difference, covariance = np.zeros(len(cells)), np.zeros((len(cells), len(cells)))
    for draw in draws:
        named = [(cells[token], chance) for token, chance in draw.law.known.items() if token in cells]
        places = np.array([cell for cell, _ in named], int)
        chances = np.array([chance for _, chance in named])
        difference[places] -= chances
        covariance[places, places] += chances
        covariance[np.ix_(places, places)] -= np.outer(chances, chances)
        if draw.token in cells:
            difference[cells[draw.token]] += 1
    return difference, covariance


def by_rank(draw: Draw) -> Draw:
    """The same draw, its tokens named by where they stand in their law: the likeliest, the second, ..."""
    known = dict.fromkeys(RANKS, 0.0)
    name = RANKS[-1]
    for rank, (token, chance) in enumerate(draw.law.known.items(), start=1):
        cell = next(cell for last, cell in zip(LAST_RANKS, RANKS, strict=False) if rank <= last)
        known[cell] += chance
        name = cell if token == draw.token else name
    known[RANKS[-1]] = draw.law.tail
    return Draw(draw.history, name, Law(known, 0.0))


def serial(texts: Iterable[Sequence[Draw]], seed: int = 0) -> Score:
    """Is a draw independent of the one before it? Squared correlation of where in their laws two neighbours fell.

    A place is uniform whatever the law (spread evenly over the drawn token's share of it).
    """
    rng = random.Random(seed)
    products = []
    for text in texts:
        places = [_place(draw, rng.random()) - 0.5 for draw in text]
        products += [12 * a * b for a, b in pairwise(places)]
    return Score(sum(products) ** 2 / max(1, len(products)), 1 if len(products) >= 100 else 0, len(products))


def _place(draw: Draw, share: float) -> float:
    below = 0.0
    for token, chance in draw.law.known.items():
        if token == draw.token:
            return below + share * chance
        below += chance
    return below + share * draw.law.tail


def two_samples(ours: Iterable[tuple[Hashable, str]], others: Iterable[tuple[Hashable, str]]) -> Score:
    """G-test of homogeneity over all histories that both servers met often enough."""
    tables: tuple[dict[Hashable, Counter[str]], ...] = (defaultdict(Counter), defaultdict(Counter))
    for table, draws in zip(tables, (ours, others), strict=True):
        for history, token in draws:
            table[history][token] += 1
    total, df, used = 0.0, 0, 0
    for history in tables[0].keys() & tables[1].keys():
        columns = _columns(tables[0][history], tables[1][history])
        if len(columns) >= 2:
            found = np.array(columns, float).T
            expected = np.outer(found.sum(1), found.sum(0)) / found.sum()
            total += _g(found.ravel(), expected.ravel())
            df += len(columns) - 1
            used += int(found.sum())
    return Score(total, df, used)


def _columns(a: Counter[str], b: Counter[str]) -> list[tuple[int, int]]:
    """Counts of both, by token; those that expect too few in either are one column."""
    share = min(a.total(), b.total()) / (a.total() + b.total())
    columns, others = [], (0, 0)
    for token in sorted(a.keys() | b.keys()):
        if (a[token] + b[token]) * share >= LEAST_EXPECTED:
            columns.append((a[token], b[token]))
        else:
            others = (others[0] + a[token], others[1] + b[token])
    if sum(others) * share >= LEAST_EXPECTED:
        columns.append(others)
    elif columns:
        columns[-1] = (columns[-1][0] + others[0], columns[-1][1] + others[1])
    return columns


@dataclass(frozen=True, slots=True)
class Distance:
    """Total variation between the ranks drawn and the laws' ranks: measured, and the bounds it lies in (99.9 %)."""

    low: float
    measured: float
    high: float


def distance(draws: Sequence[Draw], beta: float = ALPHA) -> Distance | None:
    """Azuma's bound over every union of cells; it holds for draws whose laws depend on those before."""
    if not draws:
        return None
    difference, _ = _sums(map(by_rank, draws), {rank: cell for cell, rank in enumerate(RANKS)})
    size = len(RANKS)
    measured = float(np.abs(difference).sum() / 2 / len(draws))
    slack = math.sqrt((size * math.log(2) + math.log(1 / beta)) / (2 * len(draws)))
    return Distance(max(0.0, measured - slack), measured, min(1.0, measured + slack))


def holm(ps: Mapping[Any, float]) -> dict[Any, float]:
    """p-values made good for their number (Holm 1979): one below alpha is below it among all of them."""
    adjusted, worst = {}, 0.0
    for place, (name, p) in enumerate(sorted(ps.items(), key=lambda item: item[1])):
        worst = max(worst, min(1.0, p * (len(ps) - place)))
        adjusted[name] = worst
    return adjusted


def least_seen(draws: int, df: int, num_tests: int, alpha: float = ALPHA, power: float = POWER) -> float:
    """The total variation from which on a shift is found with this power, by draws that share a law.

    A shift of total variation d moves the statistic's noncentrality by at least 4 d^2 a draw.
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    bar = chi2.isf(alpha / num_tests, df)
    needed = brentq(lambda shift: ncx2.sf(bar, df, shift) - power, 1e-6, 1e6)
    return min(1.0, math.sqrt(needed / (4 * draws)))
