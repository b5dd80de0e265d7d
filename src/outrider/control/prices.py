"""What a cycle's parts take in seconds, refined by every record: the pass, drafting, and what lies around both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.control.cost import CONTEXT, PassCost
from outrider.control.draft_cost import DraftCost
from outrider.record import Record

SMOOTH = 0.05
"""Weight of one new cycle in the means of what lies around a pass."""
KINDS = {False: "ungraded", True: "graded"}
OUTLIER = 2.0
"""What took longer than so many times the mean counts as that."""


class Prices:
    """All measured costs of an engine.

    Attributes:
        cost: of a pass. drafting: of guesses without and with a grade; a cascade's graded ones come from its cheap
            drafter. planning, settling: seconds that a cycle without guesses spends before and after its pass; plain
            decoding spends them for every token. judging: what one with guesses spends beyond that after its pass, on
            rows that are drawn. count, context: requests that decode now, and their mean tokens. learnt: records that
            refined them.
    """

    def __init__(self, cost: PassCost) -> None:
        self.cost = cost
        self.drafting = {False: DraftCost(), True: DraftCost()}
        self.planning = self.settling = self.judging = 0.0
        self.learnt = 0
        self.count = 1
        self.context: float = CONTEXT

    def to_json(self) -> dict[str, Any]:
        """All but what belongs to the requests of now."""
        drafting = {KINDS[graded]: cost.to_json() for graded, cost in self.drafting.items()}
        around = {"planning": self.planning, "settling": self.settling, "judging": self.judging}
        return {"passes": self.cost.to_json(), "drafting": drafting, **around}

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> Prices:
        """What `to_json` told.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: for anything else.
        """
        prices = cls(PassCost.of_json(kept["passes"]))
        prices.drafting = {graded: DraftCost.of_json(kept["drafting"][kind]) for graded, kind in KINDS.items()}
        prices.planning, prices.settling, prices.judging = (
            float(kept[name]) for name in ("planning", "settling", "judging")
        )
        return prices

    def scale(self, by: float) -> None:
        """The machine takes so many times as long now."""
        self.cost = self.cost.scaled(by)
        for drafting in self.drafting.values():
            drafting.scale(by)
        self.planning, self.settling, self.judging = self.planning * by, self.settling * by, self.judging * by

    def at(self, count: int, keys: int) -> None:
        """So many requests decode now, that have so many tokens together."""
        self.count, self.context = max(1, count), keys / max(1, count)

    def rows(self, rows: int) -> float:
        """Seconds of a pass of so many rows."""
        return self.cost.seconds(rows, self.count, self.context)

    def cycle(self, rows: int) -> float:
        """Seconds of a cycle whose pass has so many rows, but for drafting."""
        return self.rows(rows) + self.planning + self.settling

    def guesses(self, levels: Mapping[bool, float]) -> float:
        """Seconds that guesses of so many levels, without and with a grade, take beside the rows of their pass."""
        drafting = sum(self.drafting[graded].seconds(deep) for graded, deep in levels.items())
        return drafting + self.judging if levels else 0.0

    @property
    def token(self) -> float:
        """Seconds of plain decoding that one token of one request is worth."""
        return self.cycle(self.count) / self.count

    def learn(self, record: Record, deepest: Mapping[bool, int], lag: int) -> None:
        """deepest: levels of the deepest guess that was asked for without, and with, a grade. lag: tokens that
        drafters had to read first.
        """
        self.learnt += 1
        if record.cycles and record.keys:
            self.at(len(record.cycles), len(record.cycles) * record.keys // record.rows)
        if record.overlaps:
            # Nobody knows the parts of such a cycle: what it takes beyond its pass is the price of guessing.
            for levels in deepest.values():
                self.drafting[False].learn(levels, max(0.0, record.seconds_total - self.rows(record.rows)))
            return
        if not record.prefill_rows:
            self.cost.learn_pass(record.rows, record.seconds_verify, self.count, self.context)
            if not deepest:
                self.planning = _mean(self.planning, record.seconds_draft)
                self.settling = _mean(self.settling, record.seconds_sample)
            elif self.settling:
                self.judging = _mean(self.judging, max(0.0, record.seconds_sample - self.settling))
        if len(deepest) == 1:  # where both kinds were drafted, nobody knows whose the seconds are
            ((graded, levels),) = deepest.items()
            seconds = max(0.0, record.seconds_draft - self.planning)
            if lag and not graded:
                self.drafting[graded].learn_catch_up(levels, seconds, lag)
            else:
                self.drafting[graded].learn(levels, seconds)
        if not lag:
            self.drafting[False].fade()


def _mean(old: float, new: float) -> float:
    return old + SMOOTH * (min(new, OUTLIER * old) - old) if old else new
