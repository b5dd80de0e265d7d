"""How deep to guess, and who guesses, for all running requests at once; zero when guessing does not pay.

Numbers in, numbers out. Each request's offers (level by level, or all or nothing from a drafter that shapes its trees
itself) are weighed together under the measured costs (`choice`). A drafter that ranks its guesses is told what a node
costs in tokens (the width rule of CAST, 2610.00321) and is asked out of a purse (`purse`): what a tree will bring is
known when its first level is, and asking for that is the smaller part of its price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from outrider.control.acceptance import Evidence
from outrider.control.choice import Aim, Chosen, Offer, choose, hopeless
from outrider.control.offers import LAG, SERVES, Grades, Life, Member, Offers, Scene, grade_of
from outrider.control.prices import Prices
from outrider.control.purse import Purses
from outrider.record import Record, RequestCycle
from outrider.request import Request
from outrider.tree import NO_GUESS, Budget

DEEPEST = 16
"""Levels that are weighed where the user set no limit."""
PROBE_SHARE = 0.004
"""Share of the time that may go into finding out, while guessing does not pay, whether a text has changed: of guesses
with a grade, and of drafters that do not rank."""
PROBE_DEPTH = 3
ADVANTAGE = 1.02
"""Guessing must promise this much more than plain decoding where it begins: a promise is noisier than plain decoding's
price. It goes on while it promises anything, so that it does not flutter."""
FREE = 1.02
"""A pass that takes no longer than this has the rows for nothing: so much it wavers by itself."""
AWAKE, DROWSY = 16, 8
"""Where nothing was promised in so many cycles, many requests are asked how sure they are only every so many cycles at
least: that takes time, too."""


class Control:
    """Chooses a budget a request from running acceptance times measured costs.

    Args:
        prices: what is known of costs, and refined here. depth: most levels (None: `DEEPEST`). width: most children of
            one node. nodes: most of a tree (None: depth x width). adaptive: False always drafts `depth` levels.
        members: of the drafter. aim: what is maximised. extra_rows: most probe rows of a request; adaptively only
            those that cost next to nothing.
    """

    def __init__(
        self,
        prices: Prices,
        depth: int | None,
        width: int,
        nodes: int | None = None,
        adaptive: bool = True,
        members: Sequence[Member] = (Member(),),
        extra_rows: int = 0,
        aim: Aim = Aim(),  # noqa: B008
    ) -> None:
        self.prices = prices
        self.offers = Offers(prices, members, width)
        self.purses = Purses()
        self.depth = DEEPEST if depth is None else depth
        self.width = width
        self.nodes = self.depth * width if nodes is None else nodes
        self.adaptive = adaptive
        self.extra_rows = extra_rows
        self.aim = aim
        self.promise = 1.0
        """What the last choice promised in proportion to plain decoding."""
        self._lives: dict[int, Life] = {}
        self._is_guessing = False
        self._cycle = self._promised = 0

    def interesting(self, requests: Sequence[Request]) -> bool:
        """Whether anyone need be asked for grades; False where no guess can pay, however good: too many run."""
        if not self.depth:
            return False
        if not self.adaptive or not requests:
            return True
        keys = sum(request.num_tokens for request in requests)
        most = min(self.depth, max(1, self.nodes))
        drowsy = self._cycle - self._promised > AWAKE
        looks = not drowsy or self._cycle % min(DROWSY, len(requests)) == 0
        if looks and not hopeless(len(requests), most, keys, self.prices.cost, self._advantage):
            return True
        self._is_guessing, self.promise = False, 1.0
        return False

    def budget(self, requests: Sequence[Request], grades: Grades | None = MappingProxyType({})) -> dict[int, Budget]:
        """Budgets by request id for the requests that decode in this pass; `grades` as the drafter's members gave them;
        None where nobody was asked, as nothing is `interesting`.
        """
        budgets = self._guesses(requests, grades, outlined=False) if self.depth and grades is not None else {}
        if self.extra_rows and self.depth:
            self._spare(requests, budgets)
        return budgets

    def outlined(self, requests: Sequence[Request]) -> dict[int, Budget]:
        """As `budget`, for trees whose shape is settled before they grow: levels are weighed one by one, as those of a
        drafter that does not rank, and no node stops at its price.
        """
        return self._guesses(requests, MappingProxyType({}), outlined=True) if self.depth else {}

    def learn(self, record: Record) -> None:
        """Take in what a pass did and what it cost."""
        self._cycle += 1
        asked: list[RequestCycle] = []
        lags: dict[int, int] = {}
        for cycle in record.cycles if self.depth else ():
            if not (cycle.asked or cycle.depth):
                continue
            life = self._life(cycle.request_id)
            evidence = Evidence(cycle.request_id, cycle.member, cycle.grade, life.temperature)
            self.offers.acceptance.learn(evidence, cycle.depth, cycle.delivered - 1)
            asked.append(cycle)
            life.last[cycle.member] = self._cycle
            if cycle.grade is None:  # an empty tree, too, cost the level that found nothing worth its price
                self.offers.shapes.learn(evidence, cycle.delivered - 1, cycle.drafted, max(1, cycle.depth))
                life.read += life.lag
                if life.lag > LAG:
                    lags[cycle.request_id] = life.lag
        self.prices.learn(record, asked, sum(lags.values()))
        if not record.cycles:
            return
        self.purses.at(len(record.cycles))
        self.purses.save(len(record.cycles))
        for number, (price, reading) in self.prices.losses(record, asked, lags).items() if asked else ():
            cycle = next(cycle for cycle in asked if cycle.request_id == number)
            if cycle.grade is None and self.offers.members[cycle.member].ranks:
                self.purses.settle(number, cycle.delivered - 1 - price, reading)

    def forget(self, request: Request) -> None:
        self.offers.acceptance.forget(request.id)
        self.offers.shapes.forget(request.id)
        self.purses.forget(request.id)
        self._lives.pop(request.id, None)

    @property
    def _advantage(self) -> float:
        return 1.0 if self._is_guessing else ADVANTAGE

    def _life(self, request_id: int) -> Life:
        return self._lives.setdefault(request_id, Life(0.0, [self._cycle] * len(self.offers.members)))

    # What a budget comes from.

    def _guesses(self, requests: Sequence[Request], grades: Grades, outlined: bool) -> dict[int, Budget]:
        caps = {request.id: self._cap(request) for request in requests}
        for request in requests:
            life = self._life(request.id)
            life.temperature, life.width = request.params.temperature, request.params.width
            life.lag, life.left = request.num_tokens - life.read, request.limit - len(request.output)
        if not self.adaptive:
            always = [self.offers.always(number, self._life(number), cap, grades) for number, cap in caps.items()]
            return self._budgets([offer for offer in always if offer], grades)
        scene = self._scene(requests, grades, outlined)
        offers = [each for n, cap in caps.items() for each in self.offers.best(n, self._life(n), cap, scene)]
        chosen = choose(offers, list(caps), scene.keys, self.prices, self.aim, self._advantage)
        self._is_guessing, self.promise = bool(chosen.offers), chosen.worth
        if chosen.offers:
            self._promised = self._cycle
        taken = self._taken(offers, chosen, scene)
        if not any(self.offers.shapes_itself(offer.member, scene, offer.request_id) for offer in taken):
            return self._budgets(taken, grades)
        # What one more node of every tree would cost, in the tokens that the time is worth.
        rows = scene.count * np.arange(1, self.nodes + 3, dtype=np.float64)
        steps = np.diff(self.prices.cost.many(rows, scene.count, scene.keys))
        worth = chosen.speed / scene.count
        return self._budgets(taken, grades, tuple((steps * worth).tolist()), worth)

    def _scene(self, requests: Sequence[Request], grades: Grades, outlined: bool) -> Scene:
        count, keys = max(1, len(requests)), sum(request.num_tokens for request in requests)
        seconds = self.prices.cost.many(count + np.arange(self.nodes + 1, dtype=np.float64), count, keys)
        token = float(seconds[0]) / count
        return Scene(count, keys, token, tuple(((seconds - seconds[0]) / token).tolist()), grades, outlined)

    def _cap(self, request: Request) -> int:
        if not request.params.speculation:
            return 0
        return self.depth if request.params.depth is None else min(self.depth, request.params.depth)

    # Who guesses though it promises nothing, and who does not though it does.

    def _taken(self, offers: Sequence[Offer], chosen: Chosen, scene: Scene) -> list[Offer]:
        """The chosen offers whose requests can afford them, and of others what the share allows for finding out."""
        self.purses.at(scene.count)
        groups: dict[int, list[Offer]] = {}
        for each in offers:
            groups.setdefault(each.request_id, []).append(each)
        taken = []
        for request_id, group in groups.items():
            offer = chosen.offers.get(request_id)
            if self.offers.shapes_itself(group[0].member, scene, request_id):
                price = self.offers.price(replace(group[0], reading=0.0), group[0].rows, scene)
                price += self.offers.catch_up(self._life(request_id), group[0].member) / scene.token
                offer = group[0] if self.purses.may_ask(request_id, price, offer is not None) else None
            elif offer is None:
                offer = self._probe(group, scene)
            if offer is not None:
                taken.append(offer)
        return taken

    def _probe(self, group: Sequence[Offer], scene: Scene) -> Offer | None:
        """The deepest of a few levels that the share pays by now: few cycles in only a cheap one; where all are dear
        the shallowest waits its time.
        """
        life = self._life(group[0].request_id)
        allowed = PROBE_SHARE * (self._cycle - life.last[group[0].member])
        for offer in reversed(group[:PROBE_DEPTH]):
            whole = replace(offer, reading=offer.reading * min(SERVES, max(1, life.left)))
            if self.offers.price(whole, sum(o.rows for o in group[: offer.depth]), scene) <= allowed:
                return offer
        return None

    def _budgets(
        self, offers: Sequence[Offer], grades: Grades, prices: tuple[float, ...] = (), worth: float = 0.0
    ) -> dict[int, Budget]:
        """worth: tokens that a second of drafting must bring, of each request."""
        budgets = {}
        for offer in offers:
            grade = grade_of(grades, offer.request_id, offer.member)
            width = self.offers.width_of(offer.member, self._life(offer.request_id))
            nodes = min(offer.depth * width, self.nodes)
            level_price = worth * self.prices.drafting[offer.member].level
            budgets[offer.request_id] = Budget(offer.depth, width, nodes, prices, level_price, offer.member, grade)
        return budgets

    def _spare(self, requests: Sequence[Request], budgets: dict[int, Budget]) -> None:
        """Add probe rows to the budgets: all that the drafter takes; adaptively, those that a pass has for nothing."""
        wanting = [request.id for request in requests if request.params.speculation and request.params.depth != 0]
        count = self.extra_rows
        if self.adaptive:
            rows = len(requests) + sum(budget.nodes for budget in budgets.values())
            limit = self.prices.cost.seconds(rows) * FREE
            while count and self.prices.cost.seconds(rows + count * len(wanting)) > limit:
                count -= 1
        if count:
            budgets |= {number: replace(budgets.get(number, NO_GUESS), probes=count) for number in wanting}
