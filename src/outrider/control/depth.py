"""How deep to guess, for all running requests at once; zero when guessing does not pay. Numbers in, numbers out.

Expected tokens of a pass with N guessed levels are R plus the sum of their path weights (Leviathan et al., 2211.17192;
best-first over all requests as in DSpark, 2607.05147): levels are taken by falling weight, and the N that promises
most tokens per second under the measured cost wins; N = 0 is among the choices.
A drafter that ranks its guesses is told what a node costs in tokens and shapes its tree itself (the width rule of CAST,
2610.00321); here it is only decided which requests guess at all, and that by what their guesses gained (`purse`): what
a tree will bring is known when its first level is, and asking for that is the smaller part of its price.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from outrider.control.acceptance import Acceptance, Shapes
from outrider.control.cost import PassCost
from outrider.control.draft_cost import DraftCost
from outrider.control.purse import Purses
from outrider.record import Record
from outrider.request import Request
from outrider.tree import NO_GUESS, Budget

DEEPEST = 16
"""Levels that are weighed where the user set no limit."""
PROBE_SHARE = 0.015
"""Share of the time that may go into finding out, while guessing does not pay, whether a text has changed: of guesses
with a grade, and of drafters that do not rank."""
PROBE_DEPTH = 3
LAG = 8
"""Tokens with which a drafter's own stack catches up at no price worth naming."""
ADVANTAGE = 1.02
"""Guessing must promise this much more than plain decoding: a promise is noisier than plain decoding's price."""
FREE = 1.02
"""A pass that takes no longer than this has the rows for nothing: so much it wavers by itself."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """Something that may be added to a pass: `tokens` more are expected of `rows` more rows, `levels` deep; `graded` as
    the price of a level is."""

    request_id: int
    tokens: float
    rows: float
    levels: float
    depth: int
    graded: bool


class Control:
    """Chooses a budget a request from running acceptance times measured costs.

    Args:
        depth: most levels (None: `DEEPEST`). width: most children of one node. nodes: most of a tree (None: depth x
            width). adaptive: False always drafts `depth` levels. ranks: the drafter shapes its trees by prices.
        extra_rows: most probe rows of a request; adaptively only those that cost next to nothing.
    """

    def __init__(
        self,
        cost: PassCost,
        depth: int | None,
        width: int,
        nodes: int | None = None,
        adaptive: bool = True,
        ranks: bool = False,
        extra_rows: int = 0,
    ) -> None:
        self.cost = cost
        self.drafting = {False: DraftCost(), True: DraftCost()}
        """Of guesses without and with a grade: a cascade's graded ones come from its cheap drafter."""
        self.acceptance = Acceptance()
        self.shapes = Shapes()
        self.purses = Purses()
        self.depth = DEEPEST if depth is None else depth
        self.width = width
        self.nodes = self.depth * width if nodes is None else nodes
        self.adaptive = adaptive
        self.ranks = ranks
        self.extra_rows = extra_rows
        self._idle: dict[int, list[int]] = {}
        """By request: cycles since a guess without, and with, a grade was last asked for."""
        self._read: dict[int, int] = {}
        """By request: tokens when a guess without a grade was last asked for, all of which its drafter has read."""
        self._lag: dict[int, int] = {}
        """By request: tokens that it has yet to read in this pass."""
        self._widths: dict[int, int] = {}
        """By request: most children of one node, where it wants fewer than all."""

    def budget(
        self, requests: Sequence[Request], grades: Mapping[int, int | None] = MappingProxyType({})
    ) -> dict[int, Budget]:
        """Budgets by request id for the requests that decode in this pass; `grades` as the drafter gave them."""
        budgets = self._guesses(requests, grades, self.ranks) if self.depth else {}
        if self.extra_rows and self.depth:
            self._spare(requests, budgets)
        return budgets

    def outlined(self, requests: Sequence[Request]) -> dict[int, Budget]:
        """As `budget`, for trees whose shape is settled before they grow: levels are weighed one by one, as those of a
        drafter that does not rank, and no node stops at its price.
        """
        return self._guesses(requests, MappingProxyType({}), ranks=False) if self.depth else {}

    def _guesses(self, requests: Sequence[Request], grades: Mapping[int, int | None], ranks: bool) -> dict[int, Budget]:
        caps = {request.id: self._cap(request, grades.get(request.id)) for request in requests}
        self._widths = {r.id: r.params.width for r in requests if r.params.width is not None}
        self._lag = {request.id: request.num_tokens - self._read.get(request.id, 0) for request in requests}
        if not self.adaptive:
            return self._budgets(caps, grades)
        depths, speed = self._best(caps, grades, ranks)
        self._probe(caps, depths, grades, ranks)
        if not ranks:
            return self._budgets(depths, grades)
        # What one more node of every tree would cost, in the tokens that the time is worth.
        count = max(1, len(caps))
        seconds = [self.cost.seconds(count * (rows + 1)) for rows in range(self.nodes + 1)]
        prices = tuple((b - a) * speed / count for a, b in itertools.pairwise(seconds))
        return self._budgets(depths, grades, prices, speed / count)

    def learn(self, record: Record) -> None:
        """Take in what a pass did and what it cost."""
        deepest: dict[bool, int] = {}
        lag = 0
        for cycle in record.cycles if self.depth else ():
            asked, graded = cycle.asked or cycle.depth > 0, cycle.grade is not None
            self.acceptance.learn(cycle.request_id, cycle.depth, cycle.delivered - 1, cycle.grade)
            idle = self._idle.setdefault(cycle.request_id, [0, 0])
            idle[:] = (idle[0] + 1, idle[1] + 1)
            if asked:
                idle[graded] = 0
                deepest[graded] = max(deepest.get(graded, 1), cycle.depth)
            if asked and not graded:  # an empty tree, too, cost the level that found nothing worth its price
                self.shapes.learn(cycle.request_id, cycle.delivered - 1, cycle.drafted, max(1, cycle.depth))
                unread = self._lag.get(cycle.request_id, 0)
                self._read[cycle.request_id] = self._read.get(cycle.request_id, 0) + unread
                lag += unread if unread > LAG else 0
        if record.overlaps:
            # Nobody knows the parts of such a cycle: what it takes beyond its pass is the price of guessing.
            for levels in deepest.values():
                self.drafting[False].learn(levels, max(0.0, record.seconds_total - self.cost.seconds(record.rows)))
            self._settle(record, deepest)
            return
        if not record.prefill_rows:
            self.cost.learn_pass(record.rows, record.seconds_verify)
        if len(deepest) == 1:  # where both kinds were drafted, nobody knows whose the seconds are
            ((graded, levels),) = deepest.items()
            if lag and not graded:
                self.drafting[graded].learn_catch_up(levels, record.seconds_draft, lag)
            else:
                self.drafting[graded].learn(levels, record.seconds_draft)
        if not lag:
            self.drafting[False].fade()
        self._settle(record, deepest)

    def _settle(self, record: Record, deepest: Mapping[bool, int]) -> None:
        """Let the purses earn, and pay what guesses without a grade cost beyond what they brought."""
        count = len(record.cycles)
        if not (self.ranks and count):
            return
        token = self.cost.seconds(count) / count  # what one is worth: the time of plain decoding
        asked = [cycle for cycle in record.cycles if cycle.asked and cycle.grade is None]
        levels = self.drafting[False].seconds(deepest[False]) / len(asked) if asked else 0.0
        nodes = sum(cycle.drafted for cycle in record.cycles)
        row = (self.cost.seconds(count + nodes) - self.cost.seconds(count)) / max(1, nodes)
        for cycle in record.cycles:
            self.purses.earn(cycle.request_id, 1.0)
        for cycle in asked:
            gain = cycle.delivered - 1 - (levels + cycle.drafted * row) / token
            self.purses.settle(cycle.request_id, gain, self._catch_up(cycle.request_id) / token)

    def forget(self, request: Request) -> None:
        self.acceptance.forget(request.id)
        self.shapes.forget(request.id)
        self.purses.forget(request.id)
        self._idle.pop(request.id, None)
        self._read.pop(request.id, None)

    def _catch_up(self, request_id: int) -> float:
        """Expected seconds that a guess without a grade must first spend on reading."""
        lag = self._lag.get(request_id, 0)
        return self.drafting[False].catch_up * lag if lag > LAG else 0.0

    def _budgets(
        self,
        depths: Mapping[int, int],
        grades: Mapping[int, int | None],
        prices: tuple[float, ...] = (),
        worth: float = 0.0,
    ) -> dict[int, Budget]:
        """worth: tokens that a second of drafting must bring, of each request."""
        budgets = {}
        for request_id, depth in depths.items():
            if depth:
                grade = grades.get(request_id)
                level_price = worth * self.drafting[grade is not None].level
                width = min(self.width, self._widths.get(request_id, self.width))
                nodes = min(depth * width, self.nodes)
                budgets[request_id] = Budget(depth, width, nodes, prices, level_price, grade)
        return budgets

    def _spare(self, requests: Sequence[Request], budgets: dict[int, Budget]) -> None:
        """Add probe rows to the budgets: all that the drafter takes; adaptively, those that a pass has for nothing."""
        wanting = [request.id for request in requests if request.params.speculation and request.params.depth != 0]
        count = self.extra_rows
        if self.adaptive:
            rows = len(requests) + sum(budget.nodes for budget in budgets.values())
            limit = self.cost.seconds(rows) * FREE
            while count and self.cost.seconds(rows + count * len(wanting)) > limit:
                count -= 1
        if count:
            budgets |= {number: replace(budgets.get(number, NO_GUESS), probes=count) for number in wanting}

    def _cap(self, request: Request, grade: int | None) -> int:
        if not request.params.speculation or grade == 0:
            return 0
        return self.depth if request.params.depth is None else min(self.depth, request.params.depth)

    def _probe(
        self, caps: dict[int, int], depths: dict[int, int], grades: Mapping[int, int | None], ranks: bool
    ) -> None:
        """Let requests that decode plainly guess once in a while, as often and as deep as the share allows."""
        rows, siblings = len(caps), 1 if ranks else self.width
        plain = self.cost.seconds(rows)
        for request_id, cap in caps.items():
            graded = grades.get(request_id) is not None
            if not cap:
                continue
            if ranks and not graded:
                depths[request_id] = cap * self._affords(request_id, bool(depths[request_id]), rows)
                continue
            if depths[request_id]:
                continue
            allowed = PROBE_SHARE * self._idle.get(request_id, (0, 0))[graded] * plain / rows
            if not graded:
                allowed -= self._catch_up(request_id)
            for depth in range(min(cap, PROBE_DEPTH), 0, -1):
                dearer = self.cost.seconds(rows + depth * siblings) - plain + self.drafting[graded].seconds(depth)
                # Few cycles in, only a cheap probe is allowed; where all are dear, the shallowest waits its time.
                if dearer <= allowed:
                    depths[request_id] = depth
                    break

    def _affords(self, request_id: int, promises: bool, count: int) -> bool:
        """Whether a request asks a drafter that ranks: its purse pays a guess as its last ones were that finds nothing,
        or its guesses promise a gain and have brought no loss. count: of all that decode.
        """
        purse, shape = self.purses.of(request_id), self.shapes.of(request_id)
        plain = self.cost.seconds(count)
        dearer = self.cost.seconds(count + round(shape.nodes)) - plain
        dearer += self.drafting[False].seconds(max(1.0, shape.levels)) + self._catch_up(request_id)
        return (promises and purse >= 0) or purse * plain / count >= dearer

    def _best(
        self, caps: dict[int, int], grades: Mapping[int, int | None], ranks: bool
    ) -> tuple[dict[int, int], float]:
        """Depths by request id, and the tokens per second that they promise."""
        choices = [c for request_id, cap in caps.items() for c in self._choices(request_id, cap, grades, ranks)]
        choices.sort(key=lambda choice: (-choice.tokens / choice.rows, choice.depth, choice.request_id))
        tokens = float(len(caps))
        rows = float(len(caps))
        plain = best = tokens / self.cost.seconds(len(caps)) if caps else 0.0
        taken = 0
        deepest = [0.0, 0.0]
        for count, choice in enumerate(choices, start=1):
            tokens += choice.tokens
            rows += choice.rows
            deepest[choice.graded] = max(deepest[choice.graded], choice.levels)
            drafting = sum(self.drafting[bool(g)].seconds(levels) for g, levels in enumerate(deepest) if levels)
            speed = tokens / (self.cost.seconds(round(rows)) + drafting)
            if speed > best and speed > plain * ADVANTAGE:
                best, taken = speed, count
        depths = dict.fromkeys(caps, 0)
        for choice in choices[:taken]:
            depths[choice.request_id] = choice.depth
        return depths, best

    def _choices(self, request_id: int, cap: int, grades: Mapping[int, int | None], ranks: bool) -> list[_Choice]:
        """Level by level, or, where the drafter shapes its trees itself, all or nothing."""
        grade = grades.get(request_id)
        if ranks and grade is None and cap:
            shape = self.shapes.of(request_id)
            return [_Choice(request_id, shape.accepted, shape.nodes, shape.levels, cap, False)]
        rate, graded = self.acceptance.rate(request_id, grade), grade is not None
        rows = 1 if ranks else self.width  # a ranking drafter adds siblings only where each pays for itself
        return [_Choice(request_id, rate**level, rows, level, level, graded) for level in range(1, cap + 1)]
