"""What a cycle's parts take in seconds, learnt from its record: the pass, drafting by member; and who pays for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.control.cost import PassCost
from outrider.control.draft_cost import DraftCost
from outrider.record import Record, RequestCycle

CUT = 3.0
"""A guess that took more than so many times its price is settled as that: the machine did something else."""
SMOOTH = 0.05
"""Weight of one new cycle in the mean of what a cycle without guesses spends on planning."""


class Prices:
    """All measured costs of an engine.

    Attributes:
        cost: of a cycle but for its drafting. drafting: by member of the drafter.
    """

    def __init__(self, cost: PassCost, num_members: int = 1) -> None:
        self.cost = cost
        self.drafting = [DraftCost() for _ in range(num_members)]
        self._planning: float | None = None
        """Seconds of drafting's clock in a cycle that asks nobody: grades, plan and batch."""

    def learn(self, record: Record, asked: Sequence[RequestCycle], lag: int) -> None:
        """Refine what is known. asked: its cycles that guessed. lag: tokens that their drafters read first."""
        count = len(record.cycles)
        drafting = 0.0
        if not asked:
            old = self._planning if self._planning is not None else record.seconds_draft
            self._planning = old + SMOOTH * (record.seconds_draft - old)
        elif record.overlaps:
            # Nobody knows the parts of such a cycle: what it takes beyond its pass is the price of guessing.
            drafting = record.seconds_total - self.cost.seconds(record.rows, count, record.keys)
        else:
            drafting = record.seconds_draft - (self._planning or 0.0)
        drafting = max(0.0, drafting)
        if not record.prefill_rows and count and not (record.overlaps and asked):
            self.cost.learn(record.seconds_total - drafting, record.rows, count, record.keys)
        if len({cycle.member for cycle in asked}) == 1:  # of two, nobody knows whose the seconds are
            price, levels = self.drafting[asked[0].member], max(1, *(cycle.depth for cycle in asked), 1)
            if lag:
                price.learn_catch_up(levels, drafting, lag)
            else:
                price.learn(levels, drafting, len(asked))
        if not lag:
            for price in self.drafting:
                price.fade()

    def losses(
        self, record: Record, asked: Sequence[RequestCycle], lags: Mapping[int, int]
    ) -> dict[int, tuple[float, float]]:
        """What guessing took of each that guessed, and its reading apart, both in tokens of plain decoding: as it was
        measured, but for outliers, and shared out as it was to be expected.
        """
        count = len(record.cycles)
        plain = self.cost.seconds(count, count, record.keys * count / record.rows if record.keys else None)
        token = plain / count
        nodes = sum(cycle.drafted for cycle in record.cycles)
        row = (self.cost.seconds(record.rows, count, record.keys or None) - plain) / max(1, nodes)
        expected = {}
        for member, price in enumerate(self.drafting):
            of_member = [cycle for cycle in asked if cycle.member == member]
            deepest = max((cycle.depth for cycle in of_member), default=0)
            for cycle in of_member:
                levels = price.seconds(max(1, deepest), len(of_member)) / len(of_member)
                expected[cycle.request_id] = max(0.0, cycle.drafted * row) + levels
        whole, reading = sum(expected.values()), sum(lags.values())
        spent = whole if record.prefill_rows else max(0.0, record.seconds_total - plain)
        if reading:
            rest = max(0.0, spent - whole)
            return {
                number: (each / token, rest * lags.get(number, 0) / reading / token)
                for number, each in expected.items()
            }
        factor = min(spent / whole, CUT) if whole else 0.0
        return {number: (factor * each / token, 0.0) for number, each in expected.items()}

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return {"pass": self.cost.to_json(), "drafting": [price.to_json() for price in self.drafting]}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Prices:
        """As they were known; those of passes want to be compared with what the machine does now."""
        prices = cls(PassCost.from_json(told["pass"]), len(told["drafting"]))
        prices.drafting = [DraftCost.from_json(each) for each in told["drafting"]]
        return prices
