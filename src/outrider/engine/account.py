"""Turns a pass into its record, and adds each request's part to its own tally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.record import Record, RequestCycle
from outrider.tree import NO_GUESS

if TYPE_CHECKING:
    from outrider.engine.economy import Economy
    from outrider.engine.ends import Emission
    from outrider.engine.flight import Aloft, Flight


def record(
    flight: Flight,
    emissions: Sequence[Emission],
    seconds_sample: float,
    seconds_total: float,
    seconds_books: float = 0.0,
    economy: Economy | None = None,
) -> Record:
    """The record of a pass. A request's seconds are those of every pass it took part in, shared with others or not.

    economy: prices what it saved, where there is a drafter.
    """
    cycles = []
    prefill_rows = keys = 0
    for work, tree, emission in zip(flight.plan.works, flight.trees, emissions, strict=True):
        tally = work.request.tally
        tally.seconds_total += seconds_total
        if work.is_cycle and emission.tokens:
            depth = max(tree.depths(), default=0)
            budget = work.budget
            asked = budget.grade, budget.nodes > 0, tree.promise if len(tree) else 0.0
            cycles.append(RequestCycle(work.request.id, len(tree), depth, len(emission.tokens), *asked))
            tally.count(len(tree), len(emission.tokens))
            tally.seconds_draft += flight.seconds_draft
            tally.seconds_verify += flight.seconds_verify
            tally.seconds_sample += seconds_sample
        else:
            tally.seconds_prefill += seconds_total
        keys += (work.num_rows + len(tree)) * (work.start + work.num_rows)
        if not work.is_cycle or work.num_rows > 1:
            prefill_rows += work.num_rows
    made = Record(
        rows=flight.batch.num_rows,
        prefill_rows=prefill_rows,
        cycles=tuple(cycles),
        seconds_draft=flight.seconds_draft,
        seconds_verify=flight.seconds_verify,
        seconds_sample=seconds_sample,
        seconds_total=seconds_total,
        keys=keys,
        seconds_books=seconds_books,
    )
    return _priced(made, emissions, economy)


def flown(
    flight: Aloft,
    emissions: Sequence[Emission],
    told: Sequence[Sequence[int]],
    seconds: float,
    economy: Economy | None = None,
    captures: bool = False,
) -> Record:
    """The record of a cycle on the device. told: of each request, the tree's nodes and levels as the last two
    numbers. seconds: since the cycle before was read. economy: as of `record`. captures: as of `Record`.
    """
    cycles = []
    for emission, (*_, drafted, depth) in zip(emissions, told, strict=False):  # a crew may be filled up
        request = emission.request
        tally = request.tally
        if emission.tokens:
            tally.seconds_total += seconds
            asked = flight.budgets.get(request.id, NO_GUESS).nodes > 0
            cycles.append(RequestCycle(request.id, drafted, depth, len(emission.tokens), None, asked))
            tally.count(drafted, len(emission.tokens))
    made = Record(
        rows=len(flight.requests) * (flight.outline.nodes + 1),
        prefill_rows=0,
        cycles=tuple(cycles),
        seconds_draft=0.0,
        seconds_verify=0.0,
        seconds_sample=0.0,
        seconds_total=seconds,
        keys=sum(request.num_tokens for request in flight.requests) * (flight.outline.nodes + 1),
        overlaps=True,
        captures=captures,
    )
    return _priced(made, emissions, economy)


def _priced(made: Record, emissions: Sequence[Emission], economy: Economy | None) -> Record:
    if economy is None:
        return made
    return replace(made, saving=economy.settle(made, {e.request.id: e.request.tally for e in emissions}))
