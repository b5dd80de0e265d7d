"""What a check of a server found: one finding a test, and a report that a person can act on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from outrider.measure.endpoint.statistics import ALPHA, Distance, holm

Status = Literal["held", "broken", "refused", "untested"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One test's outcome.

    Attributes:
        name: of the test, "field: what". status: "refused" is the server's own word, and honest; "untested" is ours.
        said: what was seen. remedy: where to look, of what is broken; what it would take, of what is untested.
        count: texts compared, or draws judged. ps: p-values by kind of test; a check judges all of its own together.
        evidence: figures and texts of the first thing that is wrong.
    """

    name: str
    status: Status
    said: str = ""
    remedy: str = ""
    count: int = 0
    ps: dict[str, float] = field(default_factory=dict)
    distance: Distance | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings of one check."""

    url: str
    model: str
    reference: str | None
    power: str
    findings: tuple[Finding, ...]
    requests: int
    seconds: float

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "broken"]

    def counts(self) -> dict[str, int]:
        return {
            status: sum(finding.status == status for finding in self.findings)
            for status in ("held", "broken", "refused", "untested")
        }

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), **self.counts()}

    def lines(self) -> Iterator[str]:
        """The report as text: what is broken first, with what to do."""
        for finding in self.broken:
            yield f"BROKEN    {finding.name}: {finding.said}"
            yield f"          {finding.remedy}"
        for status in ("refused", "untested", "held"):
            for finding in self.findings:
                if finding.status == status:
                    yield f"{status:<9} {finding.name}: {finding.said}"
        counts = ", ".join(f"{count} {status}" for status, count in self.counts().items())
        yield f"{self.url}: {counts} ({self.requests} requests, {self.seconds:.0f} s)"


def judged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings with p-values, made good for the number of all of them (Holm); what falls below `ALPHA` is broken."""
    found = list(findings)
    adjusted = holm({(index, kind): p for index, each in enumerate(found) for kind, p in each.ps.items()})
    out = []
    for index, finding in enumerate(found):
        least = min(((adjusted[index, kind], kind) for kind in finding.ps), default=(1.0, ""))
        if finding.status != "held" or not finding.ps:
            out.append(finding)
        elif least[0] < ALPHA:
            said = f"{finding.said}; the {least[1]} are not the law's (p = {least[0]:.1g}, made good for all tests)"
            out.append(replace(finding, status="broken", said=said))
        else:
            out.append(replace(finding, said=f"{finding.said}; least p {min(finding.ps.values()):.2g}", remedy=""))
    return out
