"""What a trained drafter is worth, by the real engine: that it changes no text, its served tau, its speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cli.render import notes
from outrider.errors import TrainingError
from outrider.measure.bench import PLAIN, bench
from outrider.measure.contenders import ours
from outrider.measure.lossless import check
from outrider.measure.prompts import Prompt
from outrider.record import Tally
from outrider.request import SamplingParams

SERVED_DEPTH = 5
SERVED_TOKENS = 96
"""Completion tokens of each prompt."""


@dataclass(frozen=True, slots=True)
class Served:
    """A trained drafter in the engine of its target: its kind, its folder, and the device that serves it."""

    drafter: str
    target: str
    folder: Path
    device: str

    def open(self, drafter: str, **more: Any) -> Any:
        """An `LLM` with it, or with another drafter beside which it is measured."""
        from outrider import LLM

        named: dict[str, Any] = {"drafter_model": str(self.folder)} if drafter == self.drafter else {}
        return LLM(self.target, drafter=drafter, device=self.device, prefix_cache=False, **named, **more)

    def tau(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Mean accepted length, greedy, guessing a chain in every cycle.

        Raises:
            TrainingError: if a prompt failed.
        """
        llm = self.open(self.drafter, depth=SERVED_DEPTH, width=1, adaptive=False, self_test=False)
        try:
            tally = Tally()
            params = SamplingParams(max_tokens=SERVED_TOKENS, seed=0)
            for result in llm.generate([prompt.content for prompt in prompts], params):
                if result.error is not None:
                    raise TrainingError(f"the new drafter cannot be measured: {result.error}")
                tally.add(result.tally)
        finally:
            llm.close()
        return {"tau": tally.tau or 1.0, "depth": SERVED_DEPTH, "cycles": tally.cycles, "accepted": tally.accepted}

    def prove(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Served tau, `check` at temperatures 0 and 1, and the speed against plain decoding.

        Raises:
            TrainingError: if a text differs.
        """
        with notes().status("checking and measuring"):
            served = self.tau(prompts)
            report = check(
                self.open, [self.drafter], prompts, temperatures=(0.0, 1.0), max_tokens=SERVED_TOKENS, batched=True
            )
            if report.differing:
                raise TrainingError(
                    f"{report.differing} of {report.compared} texts changed with the new drafter, which must never be: "
                    f"it is not written; {self.folder} holds it, for a report of this fault"
                )
            speed = self._speed(prompts)
        checked = {"compared": report.compared, "differing": report.differing}
        return {"served": served, "check": checked, "speed": speed}

    def _speed(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        plain, llm = self.open("none"), self.open(self.drafter)
        try:
            params = SamplingParams(max_tokens=SERVED_TOKENS, seed=0)
            figures = bench({PLAIN: ours(plain, params), self.drafter: ours(llm, params)}, prompts, SERVED_TOKENS)
            dtype, device = llm.resolved.dtype, str(llm.engine.target.device)
        finally:
            plain.close()
            llm.close()
        failed = [failure for each in figures.values() for failure in each.failures]
        if failed:
            raise TrainingError(f"the new drafter cannot be measured: {failed[0][1]}")
        return {**figures[self.drafter].to_json(figures[PLAIN]), "dtype": dtype, "device": device}
