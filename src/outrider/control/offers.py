"""What each member of a drafter offers a request: tokens for rows and drafting, by what is known of both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.control.acceptance import Acceptance, Evidence, Shapes
from outrider.control.choice import Offer
from outrider.control.prices import Prices

LAG = 8
"""Tokens with which a drafter's own stack catches up at no price worth naming."""
SERVES = 48
"""Tokens over which the price of catching up is spread, where a request has so many to come."""

Grades = Mapping[int, Sequence[int | None]]
"""By request id, a grade a member of the drafter."""


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter as control sees it: whether it shapes its trees itself, by prices; most children of one node (None: as
    many as control's `width`).
    """

    ranks: bool = False
    width: int | None = None


@dataclass(slots=True)
class Life:
    """What is kept of a running request.

    Attributes:
        last: by member, the cycle in which it was last asked. read: tokens when a member without a grade was, all of
            which it has read. lag: tokens that it has yet to read in this pass. width: most children of one node.
    """

    temperature: float
    last: list[int]
    width: int | None = None
    read: int = 0
    lag: int = 0
    left: int = SERVES


@dataclass(frozen=True, slots=True)
class Scene:
    """A cycle that is planned. token: seconds of plain decoding that one is worth. rows: what so many rows more are
    worth, in tokens. outlined: the trees' shape is settled before they grow.
    """

    count: int
    keys: int
    token: float
    rows: tuple[float, ...]
    grades: Grades
    outlined: bool

    def row_price(self, rows: float) -> float:
        return self.rows[min(round(rows), len(self.rows) - 1)]


class Offers:
    """Makes them, from running acceptance and prices.

    Args:
        width: most children of one node.
    """

    def __init__(self, prices: Prices, members: Sequence[Member], width: int) -> None:
        self.prices = prices
        self.members = tuple(members)
        self.width = width
        self.acceptance = Acceptance()
        self.shapes = Shapes()

    def evidence(self, request_id: int, life: Life, member: int, grades: Grades) -> Evidence:
        """What is known of a guess before it is made."""
        return Evidence(request_id, member, grade_of(grades, request_id, member), life.temperature)

    def shapes_itself(self, member: int, scene: Scene, request_id: int) -> bool:
        """Whether an offer is of a tree that its drafter shapes."""
        if scene.outlined or not self.members[member].ranks:
            return False
        return grade_of(scene.grades, request_id, member) is None

    def best(self, request_id: int, life: Life, cap: int, scene: Scene) -> list[Offer]:
        """Of the member that promises most of this request, at this load."""
        found: list[tuple[float, list[Offer]]] = []
        for member in range(len(self.members)) if cap else ():
            evidence = self.evidence(request_id, life, member, scene.grades)
            if evidence.grade != 0:
                offers = self._of_member(evidence, life, cap, scene)
                found.append((self._gain(offers, scene) if len(self.members) > 1 else 0.0, offers))
        if not found:
            return []
        _, offers = max(found, key=lambda each: each[0])
        if len(found) > 1 and offers is not found[0][1]:
            self.acceptance.fade(self.evidence(request_id, life, 0, scene.grades))
        return offers

    def _of_member(self, evidence: Evidence, life: Life, cap: int, scene: Scene) -> list[Offer]:
        """Level by level, or, where the drafter shapes its trees itself, all or nothing."""
        request_id, member = evidence.request_id, evidence.member
        reading = 0.0 if evidence.grade is not None else self.catch_up(life, member) / min(SERVES, max(1, life.left))
        if self.shapes_itself(member, scene, request_id):
            shape = self.shapes.of(evidence)
            return [Offer(request_id, shape.accepted, max(1.0, shape.nodes), shape.levels, cap, member, reading)]
        # Who ranks adds siblings only where each pays for itself.
        rows = 1 if self.members[member].ranks and not scene.outlined else self.width_of(member, life)
        reach = self.acceptance.reach(evidence, cap)
        return [
            Offer(request_id, each, rows, level, level, member, reading) for level, each in enumerate(reach, start=1)
        ]

    def _gain(self, offers: Sequence[Offer], scene: Scene) -> float:
        """Tokens that the best of a member's offers bring beyond what they cost."""
        tokens = rows = 0.0
        best = -math.inf
        for offer in offers:
            tokens, rows = tokens + offer.tokens, rows + offer.rows
            best = max(best, tokens - self.price(offer, rows, scene))
        return best

    def price(self, offer: Offer, rows: float, scene: Scene) -> float:
        """In tokens, of so many rows and of the offer's drafting."""
        spent = self.prices.drafting[offer.member].seconds(offer.levels) + offer.reading
        return scene.row_price(rows) + spent / scene.token

    def always(self, request_id: int, life: Life, cap: int, grades: Grades) -> Offer | None:
        """Of the member whose guesses are longest right; costs do not matter. None where nobody would guess."""
        if not cap:
            return None
        found: list[tuple[float, int]] = []
        for member in range(len(self.members)):
            evidence = self.evidence(request_id, life, member, grades)
            if evidence.grade != 0:
                found.append((sum(self.acceptance.reach(evidence, cap)), member))
        if not found:
            return None
        _, member = max(found, key=lambda each: (each[0], -each[1]))
        if member and len(found) > 1:
            self.acceptance.fade(self.evidence(request_id, life, 0, grades))
        return Offer(request_id, 0.0, 0.0, cap, cap, member)

    def catch_up(self, life: Life, member: int) -> float:
        """Expected seconds that a guess without a grade must first spend on reading."""
        return self.prices.drafting[member].catch_up * life.lag if life.lag > LAG else 0.0

    def width_of(self, member: int, life: Life) -> int:
        """Most children of one node."""
        return min(self.width, self.members[member].width or self.width, life.width or self.width)


def grade_of(grades: Grades, request_id: int, member: int) -> int | None:
    """What a member said of its guess; None where it said nothing."""
    each = grades.get(request_id, ())
    return each[member] if member < len(each) else None
