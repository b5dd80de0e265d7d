"""Loads a target that the processes of `torchrun` share; all but the first serve it from then on."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch

from outrider.models.fetch import Progress
from outrider.models.loader import assemble, locate
from outrider.models.probe import probe
from outrider.models.ranks.follow import follow
from outrider.models.ranks.lead import Lead
from outrider.models.ranks.meet import meet
from outrider.models.ranks.part import Part, Wanted, part_of
from outrider.models.target import Target
from outrider.models.twin import as_twin
from outrider.record import Laps


def load_shared(
    size: int,
    model: str,
    *,
    dtype: str,
    device: str,
    kernels: str,
    threads: int | None = None,
    pass_width: int | None = None,
    progress: Progress | None = None,
    self_test: bool = True,
    widen: str | None = None,
    laps: Laps | None = None,
) -> Target:
    """As `loader.load`, of a target that `size` ranks share: on rank 0 it is one like any other.

    Raises:
        SystemExit: on every other rank, when the job is over. ConfigError: if `torchrun` did not start `size`
            processes. RankError: if one of them cannot take part. ModelError, KernelError: as `loader.load`.
    """
    ranks, laps = meet(size, device), laps or Laps()
    if not ranks.leads:
        follow(ranks)
    locate(model, progress=progress)  # a wrong name is refused before anybody is asked
    wanted, number = Wanted(model, dtype, kernels, threads, self_test, widen), ranks.number()
    with ranks.order("load", number, wanted):
        part = part_of(wanted, ranks)
    if isinstance(part, Exception):
        raise part
    laps.end("weights")
    weakref.finalize(part.body, ranks.drop, number)
    target = _target(part, ranks.device, pass_width)
    notes = [*target.notes, ranks.note] if ranks.note else target.notes
    target = replace(target, lead=Lead(ranks, number, part.kernels), notes=notes)
    if self_test:
        target = probe(target, part.expected)
        laps.end("checks of the model")
    return target


def _target(part: Part, device: torch.device, pass_width: int | None) -> Target:
    made = assemble(
        part.name,
        part.body,
        part.dtype,
        device,
        part.kernels,
        part.tokenizer,
        part.config,
        part.generation,
        pass_width,
    )
    return made if part.original is None else as_twin(made, part.original)
