"""How deep to guess, for all running requests at once; zero when guessing does not pay. Numbers in, numbers out.

Expected tokens of a pass with N guessed levels are R plus the sum of their path weights (Leviathan et al., 2211.17192;
best-first over all requests as in DSpark, 2607.05147): levels are taken by falling weight, and the N that promises
most tokens per second under the measured cost wins; N = 0 is among the choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from outrider.control.acceptance import Acceptance
from outrider.control.cost import PassCost
from outrider.record import Record
from outrider.request import Request
from outrider.tree import Budget

DEEPEST = 16
"""Levels that are weighed where the user set no limit."""
PROBE_SHARE = 0.015
"""Share of the time that may go into finding out, while guessing does not pay, whether a text has changed."""
PROBE_DEPTH = 3
ADVANTAGE = 1.02
"""Guessing must promise this much more than plain decoding: a promise is noisier than plain decoding's price."""


class Control:
    """Chooses a budget a request from running acceptance times measured costs.

    Args:
        depth: most levels (None: `DEEPEST`). width: siblings a level. adaptive: False always drafts `depth` levels.
    """

    def __init__(self, cost: PassCost, depth: int | None, width: int, adaptive: bool = True) -> None:
        self.cost = cost
        self.acceptance = Acceptance()
        self.depth = DEEPEST if depth is None else depth
        self.width = width
        self.adaptive = adaptive
        self._plain_cycles: dict[int, int] = {}

    def budget(
        self, requests: Sequence[Request], grades: Mapping[int, int | None] = MappingProxyType({})
    ) -> dict[int, Budget]:
        """Budgets by request id for the requests that decode in this pass; `grades` as the drafter gave them."""
        caps = {request.id: self._cap(request, grades.get(request.id)) for request in requests}
        depths = self._best(caps, grades) if self.adaptive else caps
        if self.adaptive:
            self._probe(caps, depths)
        return {
            request_id: Budget(depth, self.width, depth * self.width, grades.get(request_id))
            for request_id, depth in depths.items()
            if depth
        }

    def learn(self, record: Record) -> None:
        """Take in what a pass did and what it cost."""
        deepest = 0
        for cycle in record.cycles:
            self.acceptance.learn(cycle.request_id, cycle.depth, cycle.delivered - 1, cycle.grade)
            plain = self._plain_cycles.get(cycle.request_id, 0)
            self._plain_cycles[cycle.request_id] = 0 if cycle.depth else plain + 1
            deepest = max(deepest, cycle.depth)
        if not record.prefill_rows:
            self.cost.learn_pass(record.rows, record.seconds_verify)
        if deepest:
            self.cost.learn_draft(deepest, record.seconds_draft)

    def forget(self, request: Request) -> None:
        self.acceptance.forget(request.id)
        self._plain_cycles.pop(request.id, None)

    def _cap(self, request: Request, grade: int | None) -> int:
        if not request.params.speculation or grade == 0:
            return 0
        return self.depth if request.params.depth is None else min(self.depth, request.params.depth)

    def _probe(self, caps: dict[int, int], depths: dict[int, int]) -> None:
        """Let requests that decode plainly guess once in a while, as often and as deep as the share allows."""
        rows = len(caps)
        for request_id, cap in caps.items():
            if not cap or depths[request_id]:
                continue
            plain = self.cost.seconds(rows)
            allowed = PROBE_SHARE * self._plain_cycles.get(request_id, 0) * plain / len(caps)
            for depth in range(min(cap, PROBE_DEPTH), 0, -1):
                dearer = self.cost.seconds(rows + depth * self.width) - plain + depth * self.cost.draft_level
                # Few cycles in, only a cheap probe is allowed; where all are dear, the shallowest waits its time.
                if dearer <= allowed:
                    depths[request_id] = depth
                    break

    def _best(self, caps: dict[int, int], grades: Mapping[int, int | None]) -> dict[int, int]:
        levels = []
        for request_id, cap in caps.items():
            rate = self.acceptance.rate(request_id, grades.get(request_id))
            levels += [(rate**level, level, request_id) for level in range(1, cap + 1)]
        levels.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        tokens = float(len(caps))
        rows = len(caps)
        plain = best = tokens / self.cost.seconds(rows) if caps else 0.0
        taken = deepest = 0
        for count, (weight, level, _) in enumerate(levels, start=1):
            tokens += weight
            rows += self.width
            deepest = max(deepest, level)
            speed = tokens / (self.cost.seconds(rows) + deepest * self.cost.draft_level)
            if speed > best and speed > plain * ADVANTAGE:
                best, taken = speed, count
        depths = dict.fromkeys(caps, 0)
        for _, level, request_id in levels[:taken]:
            depths[request_id] = level
        return depths
