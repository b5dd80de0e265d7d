"""How many servers are wanted: by the requests there are, and by how many one bears while it keeps its goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.server.goodput import WINDOW

PERIOD = 10.0
"""Seconds between two looks at the goodput; after a bad one what it saw must have been forgotten first (`WINDOW`)."""
RAISE, LOWER = 1.1, 0.7
"""What becomes of the requests a server may have after a good look and after a bad one: up slowly, down fast (AIMD)."""
NEAR = 0.8
"""Of what it may have, from which on a good look says that it bears more."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a deployment looks like.

    Attributes:
        servers: those that run. requests: that they have, or that wait for one. good, ended: samples a second that came
            in time, and all. now: seconds.
    """

    servers: int
    requests: float
    good: float
    ended: float
    now: float


@dataclass(frozen=True, slots=True)
class Bearing:
    """What is known of how much a server bears.

    Attributes:
        limit: requests that it may have at once. due: when the goodput is judged next, in seconds.
    """

    limit: float
    due: float


def look(seen: Seen, bearing: Bearing, target: float, share: float) -> Bearing:
    """Judge the goodput, once a period: too many late ones lower what a server may have, below what it has now.

    Where each has a single request at most, nothing is learnt: another server would not make that one faster. Nor where
    all is well and each has much less than it may: that tells nothing of the limit.

    Args:
        target: most requests that a server may ever have at once. share: of the samples that must be good.
    """
    if seen.now < bearing.due or not seen.servers:
        return bearing
    each, limit, pause = seen.requests / seen.servers, bearing.limit, PERIOD
    if seen.ended and seen.good < share * seen.ended:
        limit, pause = min(limit, LOWER * each) if each > 1 else limit, WINDOW
    elif seen.ended and each >= NEAR * limit:
        limit = RAISE * limit
    return Bearing(min(target, max(1.0, limit)), seen.now + pause)


def wanted(seen: Seen, bearing: Bearing) -> float:
    """Servers for the requests there are; whoever asks rounds up and keeps the bounds."""
    return seen.requests / bearing.limit


class Autoscale:
    """Ray Serve's door: its autoscaling config names this class, with `look`'s `target` and `share` as keywords.

    Bounds, delays and rounding are Ray's own, around it; so is the memory of what is known.
    """

    def __init__(self, target: float, share: float) -> None:
        self.target = float(target)
        self.share = float(share)

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Servers wanted now.

        Args:
            context: `ray.serve.config.AutoscalingContext`; servers tell `good` and `ended` as their autoscaling stats.
        """
        before: Mapping[str, Any] = context.policy_state or {}
        told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        good, ended = (sum(told.get(name, {}).values()) for name in ("good", "ended"))
        now = float(context.current_time or 0.0)
        seen = Seen(context.current_num_replicas, float(context.total_num_requests), good, ended, now)
        start = Bearing(float(before.get("limit", self.target)), float(before.get("due", now + PERIOD)))
        bearing = look(seen, start, self.target, self.share)
        return wanted(seen, bearing), {"limit": bearing.limit, "due": bearing.due}
