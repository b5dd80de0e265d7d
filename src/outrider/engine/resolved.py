"""What runs, setting by setting, and why: what `resolve` decided, as text and as plain data."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

import outrider
from outrider.engine.memory import MemoryPlan

HIDDEN = ("memory", "pass_seconds", "start", "probe", "drafter_probe", "reasons", "notes")
"""Settings with a line of their own, or only in the JSON."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What runs: every setting after its "auto" was decided, and why; printed at start, saved with every report.

    Attributes:
        pass_seconds: of a pass, by its rows. start: seconds of the parts of the start.
    """

    model: str
    way: str
    dtype: str
    numerics: str
    device: str
    tensor_parallel: int
    kernels: str
    fixed_width: int | None
    drafter: str
    depth: int
    width: int
    nodes: int
    adaptive: bool
    objective: str
    acceptance: str
    exactness: str
    max_context: int
    max_requests: int
    max_rows: int
    block_size: int
    prefix_cache: bool
    in_flight: int
    memory: MemoryPlan
    pass_seconds: dict[int, float]
    start: dict[str, float]
    versions: dict[str, str]
    probe: dict[str, Any] | None
    drafter_probe: dict[str, Any] | None
    reasons: dict[str, str]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "memory": self.memory.to_json()}

    def lines(self) -> list[str]:
        """One line a setting, with its reason where it was decided here."""
        shown = {k: v for k, v in asdict(self).items() if k not in HIDDEN}
        width = max(map(len, shown))
        lines = [
            f"{name:<{width}}  {value}" + (f"  ({self.reasons[name]})" if name in self.reasons else "")
            for name, value in shown.items()
        ]
        lines.append(f"{'memory':<{width}}  {self.memory.sentence()}")
        passes = ", ".join(f"{rows}: {seconds * 1e3:.1f} ms" for rows, seconds in self.pass_seconds.items())
        start = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.start.items())
        lines += [f"{'pass':<{width}}  by rows {passes}", f"{'start':<{width}}  {start}"]
        return [*lines, *(f"note: {note}" for note in self.notes)]


def versions() -> dict[str, str]:
    """What a figure depends on besides the machine."""
    return {
        "outrider": outrider.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
