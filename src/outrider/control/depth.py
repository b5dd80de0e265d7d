"""How deep to guess, for all running requests at once; zero when guessing does not pay. Numbers in, numbers out.

Expected tokens of a pass with N guessed levels are R plus the sum of their path weights (Leviathan et al., 2211.17192;
best-first over all requests as in DSpark, 2607.05147): levels are taken by falling weight, and the N that promises
most of what is wanted (`objective`) under the measured cost wins; N = 0 is among the choices.
A drafter that ranks its guesses is told what a node costs in tokens and shapes its tree itself (the width rule of CAST,
2610.00321); here it is only decided which requests guess at all, by what their trees promised and how that was kept
(`shapes`). Those that do not pay are tried again out of a purse (`purse`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from outrider.control.acceptance import Acceptance
from outrider.control.choice import Choice, best
from outrider.control.company import PROBE_DEPTH, PROBE_SHARE, RETURN, Bounds, Together
from outrider.control.cost import PassCost
from outrider.control.life import Lives
from outrider.control.objective import Objective, Throughput
from outrider.control.prices import Prices
from outrider.control.purse import Purses
from outrider.control.shapes import Shapes
from outrider.record import Record
from outrider.request import Request
from outrider.tree import NO_GUESS, Budget

UNBOUNDED = 1 << 30
DEEPEST = 16
"""Levels that are weighed where the user set no limit."""
SUREST = 0.95
"""No guess is surer than this."""
FAINT = 0.02
"""Levels that are reached less often than this are not weighed."""
REMINDER = 64
"""Of so many cycles two in a row are plain, so that the price of the second is known: what is always avoided seems ever
dearer, or cheaper, and the first behind a guess takes longer than plain decoding does."""
AWAKE, DROWSY = 16, 8
"""Where nothing was promised in so many cycles, requests are looked at only every so many at most."""
FREE = 1.02
"""A pass that takes no longer than this has the rows for nothing: so much it wavers by itself."""


class Control:
    """Chooses a budget a request from running acceptance times measured costs.

    Attributes:
        rows: most of a pass, which cycles in flight are held to.

    Args:
        depth: most levels (None: `DEEPEST`). width: most children of one node. nodes: most of a tree (None: depth x
            width). adaptive: False always drafts `depth` levels. ranks: the drafter shapes its trees by prices.
        extra_rows: most probe rows of a request; adaptively only those that cost next to nothing. objective: what the
            guesses of a pass are to bring about.
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
        objective: Objective | None = None,
    ) -> None:
        self.objective = objective or Throughput()
        self.prices = Prices(cost)
        self.acceptance = Acceptance()
        self.shapes = Shapes()
        self.purses = Purses()
        self.depth = DEEPEST if depth is None else depth
        self.width = width
        self.nodes = self.depth * width if nodes is None else nodes
        self.adaptive = adaptive
        self.ranks = ranks
        self.extra_rows = extra_rows
        self.rows = UNBOUNDED
        self._lives = Lives()
        self._aloft = Together()
        self._cycle = self._promised = 0

    @property
    def cost(self) -> PassCost:
        """Of a pass."""
        return self.prices.cost

    @cost.setter
    def cost(self, cost: PassCost) -> None:
        self.prices.cost = cost

    def looks(self, requests: Sequence[Request]) -> bool:
        """Whether a budget, and the grades that it takes, are worth their time in this cycle; False where no guess is
        wanted, or none can pay, however good.

        Where nothing was promised for a while that is not looked up in every cycle, the less often the more requests
        there are: it takes some 0.1 ms each, which is two in a hundred of a small model's pass.
        """
        if not self.depth or not any(request.params.speculation for request in requests):
            return False
        count = len(requests)
        if not self.adaptive or self.extra_rows:
            return True
        if self._cycle - self._promised > AWAKE and self._cycle % min(DROWSY, 4 * count):
            return False
        self.prices.flies = False
        self.prices.at(count, sum(request.num_tokens for request in requests))
        return self.prices.rows(count + 1) - self.prices.rows(count) < SUREST * self.prices.token

    def budget(
        self, requests: Sequence[Request], grades: Mapping[int, int | None] = MappingProxyType({})
    ) -> dict[int, Budget]:
        """Budgets by request id for the requests that decode in this pass; `grades` as the drafter gave them."""
        self.prices.flies = False
        budgets = self._guesses(requests, grades) if self.depth else {}
        if self.extra_rows and self.depth:
            self._spare(requests, budgets)
        return budgets

    def outlined(self, requests: Sequence[Request]) -> dict[int, Budget]:
        """As `budget`, for cycles in flight, whose trees have one shape: all guess or none, and no node has a price."""
        self.prices.flies = True
        caps = self._meet(requests, MappingProxyType({}))
        if not self.adaptive:
            return self._budgets(caps, {})
        if self._cycle % REMINDER == REMINDER - 1:
            return {}
        rates = {number: (self.acceptance.rate(number, None), cap) for number, cap in caps.items() if cap}
        lives, bounds = {number: self._lives[number] for number in caps}, Bounds(self.width, self.nodes, self.rows)
        depths, promises = self._aloft.depths(rates, lives, bounds, self.prices, self.objective, self._cycle)
        self._promised = self._cycle if promises else self._promised
        return self._budgets(depths, {})

    def _meet(self, requests: Sequence[Request], grades: Mapping[int, int | None]) -> dict[int, int]:
        """Most levels of each."""
        self.prices.at(len(requests), sum(request.num_tokens for request in requests))
        for request in requests:
            if self._lives.meet(request, self._cycle):
                self.purses.begin(request.id)
        return {request.id: self._cap(request, grades.get(request.id)) for request in requests}

    def _guesses(self, requests: Sequence[Request], grades: Mapping[int, int | None]) -> dict[int, Budget]:
        caps = self._meet(requests, grades)
        if not self.adaptive:
            return self._budgets(caps, grades)
        if self._cycle % REMINDER >= REMINDER - 2:
            return {}
        depths, speed = self._best(caps, grades)
        self._probe(caps, depths, grades)
        self._one_first(depths, grades)
        if not any(depths.values()):
            return {}
        if not self.ranks:
            return self._budgets(depths, grades)
        # What one more node of every tree would cost, in the tokens that the time is worth.
        count = len(caps)
        seconds = [self.prices.rows(count * (rows + 1)) for rows in range(self.nodes + 1)]
        prices = tuple((b - a) * speed / count for a, b in itertools.pairwise(seconds))
        return self._budgets(depths, grades, prices, speed / count)

    def learn(self, record: Record) -> Record:
        """Take in what a pass did and what it cost; returned with what it was expected to."""
        self._cycle += bool(record.cycles)
        self.purses.earn(len(record.cycles))
        asked = [cycle for cycle in record.cycles if cycle.asked or cycle.depth] if self.depth else []
        if asked and record.overlaps:
            self._aloft.asked = self._cycle
        deepest: dict[bool, int] = {}
        lag = 0
        for cycle in asked:
            graded, life = cycle.grade is not None, self._lives[cycle.request_id]
            self.acceptance.learn(cycle.request_id, cycle.depth, cycle.delivered - 1, cycle.grade)
            life.last[graded] = self._cycle
            deepest[graded] = max(deepest.get(graded, 1), cycle.depth)
            if not graded:  # an empty tree, too, cost the level that found nothing worth its price
                tree = cycle.delivered - 1, cycle.promised, cycle.drafted, max(1, cycle.depth)
                self.shapes.learn(cycle.request_id, life.heat, *tree)
                lag += life.lag
        expected = self.prices.learn(record, deepest, lag)
        for cycle in asked:
            if cycle.grade is None:
                life = self._lives[cycle.request_id]
                loss, reading = self._loss(cycle.request_id)
                self.purses.pay(cycle.request_id, loss, 0.0 if life.invests else reading)
                life.read += life.unread
        return replace(record, seconds_expected=expected)

    def _loss(self, request_id: int) -> tuple[float, float]:
        """Tokens that a guess is expected to lose; below 0 is a gain; and what is to be read first takes."""
        shape = self.shapes.of(request_id, self._lives[request_id].heat)
        token, count = self.prices.token, self.prices.count
        levels = self.prices.guesses({False: max(1.0, shape.levels)})
        rows = self.prices.rows(count + round(shape.nodes)) - self.prices.rows(count)
        if self._cycle - self._promised > 1:  # it is alone, and plain decoding goes on behind it
            levels += max(0.0, self.prices.around.returning)
        return (rows + levels) / token - shape.accepted, self._catch_up(request_id) / token

    def forget(self, request: Request) -> None:
        self.acceptance.forget(request.id)
        self.shapes.forget(request.id)
        self.purses.forget(request.id)
        self._lives.forget(request.id)

    def _catch_up(self, request_id: int) -> float:
        """Expected seconds that a guess without a grade must first spend on reading."""
        return self.prices.drafting[False].catch_up * self._lives[request_id].lag

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
                level_price = worth * self.prices.drafting[grade is not None].level
                told = prices
                if grade is None and prices:
                    trust = self.shapes.trust(request_id, self._lives[request_id].heat)
                    told, level_price = tuple(price / trust for price in prices), level_price / trust
                width = min(self.width, self._lives[request_id].width or self.width)
                nodes = min(depth * width, self.nodes)
                budgets[request_id] = Budget(depth, width, nodes, told, level_price, grade)
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

    def _probe(self, caps: dict[int, int], depths: dict[int, int], grades: Mapping[int, int | None]) -> None:
        """Let requests that decode plainly guess once in a while, as often and as deep as the share allows."""
        rows, siblings = len(caps), 1 if self.ranks else self.width
        plain = self.prices.cycle(rows)
        for request_id, cap in caps.items():
            graded = grades.get(request_id) is not None
            if not cap:
                continue
            if self.ranks and not graded:
                depths[request_id] = cap * self._affords(request_id, bool(depths[request_id]))
                continue
            if depths[request_id]:
                continue
            allowed = PROBE_SHARE * (self._cycle - self._lives[request_id].last[graded]) * plain / rows
            if not graded:
                allowed -= self._catch_up(request_id)
            for depth in range(min(cap, PROBE_DEPTH), 0, -1):
                dearer = (
                    self.prices.cycle(rows + depth * siblings) - plain + self.prices.drafting[graded].seconds(depth)
                )
                # Few cycles in, only a cheap probe is allowed; where all are dear, the shallowest waits its time.
                if dearer <= allowed:
                    depths[request_id] = depth
                    break

    def _one_first(self, depths: dict[int, int], grades: Mapping[int, int | None]) -> None:
        """Of the requests whose guess, without a grade, has a price that nobody knows, one makes it, the one with least
        to read: many at once might read all their prompts for nothing.
        """
        price = self.prices.drafting[False]
        if price.knows(reads=True):
            return
        asking = [number for number, depth in depths.items() if depth and grades.get(number) is None]
        asking.sort(key=lambda number: self._lives[number].unread)
        for place, number in enumerate(asking):
            if place and not price.knows(reads=self._lives[number].lag > 0):
                depths[number] = 0

    def _affords(self, request_id: int, promises: bool) -> bool:
        """Whether a request asks a drafter that ranks: its trees promise a gain, which pays for what is to be read
        first, or its purse pays for finding out.
        """
        life = self._lives[request_id]
        loss, reading = self._loss(request_id)
        accepted = self.shapes.of(request_id, life.heat).accepted
        life.invests = promises and -loss * life.left / (1 + accepted) >= RETURN * reading
        return life.invests or self.purses.affords(request_id, loss, reading)

    def _best(self, caps: dict[int, int], grades: Mapping[int, int | None]) -> tuple[dict[int, int], float]:
        """Depths by request id, and the tokens per second that they promise."""
        choices = [c for request_id, cap in caps.items() for c in self._choices(request_id, cap, grades)]
        taken, speed = best(choices, len(caps), self.prices, self.objective)
        if taken:
            self._promised = self._cycle
        return dict.fromkeys(caps, 0) | {choice.request_id: choice.depth for choice in taken}, speed

    def _choices(self, request_id: int, cap: int, grades: Mapping[int, int | None]) -> list[Choice]:
        """Level by level, or, where the drafter shapes its trees itself, all or nothing."""
        grade = grades.get(request_id)
        if self.ranks and grade is None and cap:
            shape = self.shapes.of(request_id, self._lives[request_id].heat)
            return [Choice(request_id, shape.accepted, shape.nodes, shape.levels, cap, False)]
        rate, graded = self.acceptance.rate(request_id, grade), grade is not None
        rows = 1 if self.ranks else self.width  # a ranking drafter adds siblings only where each pays for itself
        chances = itertools.takewhile(lambda chance: chance > FAINT, (rate**level for level in range(1, cap + 1)))
        return [Choice(request_id, chance, rows, at, at, graded) for at, chance in enumerate(chances, start=1)]
