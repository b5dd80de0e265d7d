"""The figures of a deployment: its own, and those of its servers, one by one and together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

KEPT = 256
"""Servers whose last figures are kept one by one; older ones are added up."""
SUMMED = ("outrider_num_requests_running", "outrider_num_requests_waiting", "outrider_num_preemptions")
"""Gauges that add up; others are told server by server, as a mean of shares is nobody's share."""

Key = tuple[str, tuple[tuple[str, str], ...]]


class Figures:
    """What the door of a deployment counts by itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider_deploy_{name}", text, labels, registry=self.registry)

        self.requests = counter("http_requests", "Answers of the door by route and status.", "route", "status")
        self.retried = counter("requests_retried", "Requests asked anew, since their server was lost unheard.")
        self.broken = counter("answers_broken", "Answers that ended in an error, since their server was lost.")
        self.servers = Gauge("outrider_deploy_replicas", "Servers that told their figures.", registry=self.registry)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


class Pool:
    """Figures of many servers, some of which go.

    Counters of those that went stay in the sums: a sum that falls would be taken for a counter that began anew.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[str, dict[Key, float]] = OrderedDict()
        self._gone: dict[Key, float] = {}
        self._families: dict[str, Family] = {}

    def pooled(self, told: Mapping[str, bytes]) -> bytes:
        """One page for all servers, in the names of one server's.

        Args:
            told: of each server that answered now, its page.
        """
        sums: dict[Key, float] = {}
        for server, page in told.items():
            counted = self._last[server] = {}
            self._last.move_to_end(server)
            for family, (name, labels), value in _samples(page):
                self._families[name] = family
                if family.kind in ("counter", "histogram"):
                    counted[name, labels] = value
                elif name in SUMMED:
                    _add(sums, {(name, labels): value})
                else:
                    sums[name, (*labels, ("replica", server))] = value
        while len(self._last) > max(KEPT, len(told)):
            _add(self._gone, self._last.popitem(last=False)[1])
        for before in (self._gone, *self._last.values()):
            _add(sums, before)
        return _page((self._families[key[0]], key, value) for key, value in sums.items())


def apart(told: Mapping[str, bytes]) -> bytes:
    """One page with the series of every server, each with its name as the label `replica`."""
    return _page(
        (family, (name, (*labels, ("replica", server))), value)
        for server, page in told.items()
        for family, (name, labels), value in _samples(page)
    )


@dataclass(frozen=True, slots=True)
class Family:
    """What is said of some samples together."""

    name: str
    text: str
    kind: str


def _samples(page: bytes) -> Iterator[tuple[Family, Key, float]]:
    for found in text_string_to_metric_families(page.decode()):
        family = Family(found.name, found.documentation, found.type)
        for sample in found.samples:
            if not sample.name.endswith("_created"):
                yield family, (sample.name, tuple(sample.labels.items())), sample.value


def _add(sums: dict[Key, float], more: Mapping[Key, float]) -> None:
    for key, value in more.items():
        sums[key] = sums.get(key, 0.0) + value


def _page(samples: Iterable[tuple[Family, Key, float]]) -> bytes:
    grouped: dict[Family, Metric] = {}
    for family, (name, labels), value in samples:
        metric = grouped.setdefault(family, Metric(family.name, family.text, family.kind))
        metric.add_sample(name, dict(labels), value)
    return generate_latest(_Collected(list(grouped.values())))


class _Collected(CollectorRegistry):
    """Families that were collected already."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._found = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._found)
