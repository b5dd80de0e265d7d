"""What a cycle's parts take in seconds, refined by every record: the pass, drafting, and what lies around both."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from outrider.control.cost import CONTEXT, PassCost
from outrider.control.draft_cost import DraftCost
from outrider.record import Record

SMOOTH = 0.05
"""Weight of one new cycle in the means of what lies around a pass."""
PARTS = ("planning", "settling", "judging", "returning")
KINDS = {False: "ungraded", True: "graded"}
OUTLIER = 2.0
"""What took longer than so many times the mean counts as that."""


@dataclass(slots=True)
class Around:
    """What lies around the passes of cycles of one kind, in seconds.

    Attributes:
        drafting: of guesses without and with a grade; a cascade's graded ones come from its cheap drafter. planning,
            settling: what a cycle without guesses spends before and after its pass; plain decoding spends them for
            every token. judging: what one with guesses spends beyond that after its pass, on rows that are drawn.
            returning: what a pass without guesses takes longer right behind a cycle with some, whose drafter has been
            through the caches.
    """

    drafting: dict[bool, DraftCost] = field(default_factory=lambda: {False: DraftCost(), True: DraftCost()})
    planning: float = 0.0
    settling: float = 0.0
    judging: float = 0.0
    returning: float = 0.0

    def to_json(self) -> dict[str, Any]:
        drafting = {KINDS[graded]: cost.to_json() for graded, cost in self.drafting.items()}
        return {"drafting": drafting, **{name: getattr(self, name) for name in PARTS}}

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> Around:
        """What `to_json` told; raises as `Prices.of_json`."""
        drafting = {graded: DraftCost.of_json(kept["drafting"][kind]) for graded, kind in KINDS.items()}
        return cls(drafting, *(float(kept[name]) for name in PARTS))

    @property
    def always(self) -> float:
        """Seconds around every pass."""
        return self.planning + self.settling

    def guesses(self, levels: Mapping[bool, float]) -> float:
        """As `Prices.guesses`."""
        drafting = sum(self.drafting[graded].seconds(deep) for graded, deep in levels.items())
        return drafting + self.judging if levels else 0.0

    def scale(self, by: float) -> None:
        for drafting in self.drafting.values():
            drafting.scale(by)
        for name in PARTS:
            setattr(self, name, getattr(self, name) * by)


class Prices:
    """All measured costs of an engine.

    Attributes:
        cost: of a pass. lockstep, aloft: of cycles that are read before the next begins, and of those in flight, whose
            drafter may cost a tenth. flies: which of them the next cycle is. count, context: requests that decode now,
            and their mean tokens. learnt: records that refined them.
    """

    def __init__(self, cost: PassCost) -> None:
        self.cost = cost
        self.lockstep, self.aloft = Around(), Around()
        self.flies = False
        self.learnt = 0
        self._guessed = False
        self.count = 1
        self.context: float = CONTEXT

    @property
    def around(self) -> Around:
        """Of cycles such as the next one."""
        return self.aloft if self.flies else self.lockstep

    @property
    def drafting(self) -> dict[bool, DraftCost]:
        """Of guesses without and with a grade, in cycles such as the next one."""
        return self.around.drafting

    def to_json(self) -> dict[str, Any]:
        """All but what belongs to the requests of now."""
        ways = {"lockstep": self.lockstep.to_json(), "aloft": self.aloft.to_json()}
        return {"passes": self.cost.to_json(), **ways}

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> Prices:
        """What `to_json` told.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: for anything else.
        """
        prices = cls(PassCost.of_json(kept["passes"]))
        prices.lockstep, prices.aloft = Around.of_json(kept["lockstep"]), Around.of_json(kept["aloft"])
        return prices

    def copy(self) -> Prices:
        """Prices that learn apart from these."""
        return deepcopy(self)

    def scale(self, by: float) -> None:
        """The machine takes so many times as long now."""
        self.cost = self.cost.scaled(by)
        self.lockstep.scale(by)
        self.aloft.scale(by)

    def at(self, count: int, keys: int) -> None:
        """So many requests decode now, that have so many tokens together."""
        self.count, self.context = max(1, count), keys / max(1, count)

    def rows(self, rows: int) -> float:
        """Seconds of a pass of so many rows."""
        return self.cost.seconds(rows, self.count, self.context)

    def cycle(self, rows: int) -> float:
        """Seconds of a cycle whose pass has so many rows, but for drafting."""
        return self.rows(rows) + self.around.always

    def guesses(self, levels: Mapping[bool, float]) -> float:
        """Seconds that guesses of so many levels, without and with a grade, take beside the rows of their pass."""
        return self.around.guesses(levels)

    @property
    def token(self) -> float:
        """Seconds of plain decoding that one token of one request is worth."""
        return self.cycle(self.count) / self.count

    def learn(self, record: Record, deepest: Mapping[bool, int], lag: int) -> float | None:
        """Returns the seconds that were to be expected before, as `Record.seconds_expected` has them.

        deepest: levels of the deepest guess that was asked for without, and with, a grade. lag: tokens that
        drafters had to read first.
        """
        self.learnt += 1
        if record.cycles and record.keys:
            self.at(len(record.cycles), len(record.cycles) * record.keys // record.rows)
        if record.captures:
            return None
        if record.overlaps:
            expected = self.rows(record.rows) + self.aloft.planning
            price = self.aloft.drafting[False]
            expected += sum(price.seconds(levels) for levels in deepest.values()) + lag * price.catch_up
            self._learn_aloft(record, deepest, lag)
            return expected
        around = self.lockstep
        returns = self._guessed and not deepest
        drafting = around.guesses(deepest) + lag * around.drafting[False].catch_up
        expected = self.rows(record.rows) + around.always + drafting + returns * around.returning
        self._learn_lockstep(record, deepest, lag, returns)
        self._guessed = bool(deepest)
        return expected if record.cycles and not record.prefill_rows else None

    def _learn_lockstep(self, record: Record, deepest: Mapping[bool, int], lag: int, returns: bool) -> None:
        """returns: without guesses, right behind a cycle with some; that is not what plain decoding takes."""
        around = self.lockstep
        if not record.prefill_rows:
            if returns:
                beyond = record.seconds_verify - self.rows(record.rows)
                around.returning += SMOOTH * (min(beyond, self.rows(record.rows)) - around.returning)
            else:
                self.cost.learn_pass(record.rows, record.seconds_verify, self.count, self.context)
            if not deepest:
                around.planning = _mean(around.planning, record.seconds_draft)
                around.settling = _mean(around.settling, record.seconds_sample)
            elif around.settling:
                around.judging = _mean(around.judging, max(0.0, record.seconds_sample - around.settling))
        if len(deepest) == 1:  # where both kinds were drafted, nobody knows whose the seconds are
            ((graded, levels),) = deepest.items()
            seconds = max(0.0, record.seconds_draft - around.planning)
            if lag and not graded:
                around.drafting[graded].learn_catch_up(levels, seconds, lag)
            else:
                around.drafting[graded].learn(levels, seconds)
        if not lag:
            around.drafting[False].fade()

    def _learn_aloft(self, record: Record, deepest: Mapping[bool, int], lag: int) -> None:
        """Nobody knows the parts of such a cycle: what it takes beyond its pass, and beyond what one without guesses
        does, is the price of guessing.
        """
        beyond = max(0.0, record.seconds_total - self.rows(record.rows))
        if not deepest:
            self.aloft.planning = _mean(self.aloft.planning, beyond)
        price, beyond = self.aloft.drafting[False], max(0.0, beyond - self.aloft.planning)
        for levels in deepest.values():
            if lag:
                price.learn_catch_up(levels, beyond, lag)
            else:
                price.learn(levels, beyond)
        if not lag:
            price.fade()


def _mean(old: float, new: float) -> float:
    return old + SMOOTH * (min(new, OUTLIER * old) - old) if old else new
