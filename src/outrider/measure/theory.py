"""What theory promises of chains: tokens a cycle and speed-up by depth, from one acceptance and the price of a guess.

Leviathan et al. (2211.17192, section 3): where every guess is right with the same chance alpha, independent of the
others, a chain of K brings (1 - alpha^(K+1)) / (1 - alpha) tokens a cycle, its bonus included; where a guess costs c
plain passes and its row in the target's pass nothing, that is (1 - alpha^(K+1)) / ((1 - alpha) (K c + 1)) times as
fast. Rows are not free everywhere, so a second curve has the target's pass at its measured price, for as many rows as
the drafter brought: one that looks guesses up is often silent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.control.cost import PassCost
from outrider.record import Tally


def expected_tokens(alpha: float, depth: int) -> float:
    """Tokens a cycle of a chain of `depth` guesses, the target's own included."""
    return depth + 1.0 if alpha == 1 else (1 - alpha ** (depth + 1)) / (1 - alpha)


def rows_free(alpha: float, depth: int, draft: float) -> float:
    """Speed-up where a guess costs `draft` plain cycles and its row nothing."""
    return expected_tokens(alpha, depth) / (depth * draft + 1)


def rows_priced(alpha: float, depth: int, draft: float, row: Callable[[float], float], filled: float = 1.0) -> float:
    """Speed-up where a pass of so many rows makes a cycle `row(rows)` plain cycles long, guesses aside.

    filled: share of the `depth` guesses that a drafter brings on average.
    """
    return expected_tokens(alpha, depth) / (depth * draft + row(1 + filled * depth))


def acceptance(tallies: Mapping[int, Tally]) -> float | None:
    """The one chance that explains chains best (the likeliest): guesses kept over guesses reached; None without any.

    tallies: by depth of the chains. A cycle reaches its first guess, and each further one if that before was kept.
    """
    kept = reached = 0
    for depth, tally in tallies.items():
        kept += sum(tally.accepted_by_position[:depth])
        reached += tally.cycles + sum(tally.accepted_by_position[: depth - 1])
    return kept / reached if reached else None


@dataclass(frozen=True, slots=True)
class Seen:
    """Chains of one depth as they were measured: seconds are means of a cycle.

    Attributes:
        draft, plain_draft: seconds before the target's pass, here and in plain cycles. plain: a plain cycle, of which
            `plain_pass` is the target's.
    """

    depth: int
    tally: Tally
    draft: float
    plain_draft: float
    plain: float
    plain_pass: float


def predict(chains: Sequence[Seen], prices: Mapping[int, float], deepest: int) -> dict[str, Any] | None:
    """Both curves for depths from 0 to `deepest`, with what they were made of; None where nothing was guessed.

    prices: seconds of a pass by its rows, as the engine measured them at its start.
    """
    alpha = acceptance({seen.depth: seen.tally for seen in chains})
    if alpha is None:
        return None
    mean = sum(seen.plain for seen in chains) / len(chains)
    share = sum(seen.plain_pass for seen in chains) / len(chains) / mean
    levels = sum(seen.depth for seen in chains)
    draft = max(0.0, sum(seen.draft - seen.plain_draft for seen in chains)) / levels / mean
    asked = sum(seen.tally.cycles * seen.depth for seen in chains)
    filled = sum(seen.tally.drafted for seen in chains) / asked
    cost = PassCost(prices)

    def row(rows: float) -> float:
        whole = math.floor(rows)
        low, high = cost.seconds(whole), cost.seconds(whole + 1)
        return 1 + share * ((low + (rows - whole) * (high - low)) / cost.seconds(1) - 1)

    points = [
        Point(k, rows_free(alpha, k, draft), rows_priced(alpha, k, draft, row, filled)) for k in range(deepest + 1)
    ]
    return {"alpha": alpha, "draft": draft, "filled": filled, "points": [asdict(point) for point in points]}


@dataclass(frozen=True, slots=True)
class Point:
    """Predicted speed-ups at a depth."""

    depth: int
    free: float
    priced: float
