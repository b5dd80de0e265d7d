"""Sums and gatherings among ranks by Triton's interpreter, in which no rank runs beside another.

Each exchange runs twice: at first nobody waits, so that every rank sends, and what comes out is worthless; then once
more from the same counts, when all words are there. Inboxes hold two launches, so that no exchange takes more here.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux on x86-64)")
if torch.cuda.is_available():
    pytest.skip("with a GPU here Triton's kernels run on it: pytest -m gpu", allow_module_level=True)

from outrider.kernels.triton import exchange
from outrider.kernels.triton.exchange import Exchange

BLOCK, ROOM = 16, 64


@pytest.fixture(params=[2, 4])
def ranks(request, monkeypatch):
    """Exchanges of that many ranks, with so little room that most take several launches."""
    monkeypatch.setattr(exchange, "BLOCK", BLOCK)
    monkeypatch.setattr(exchange, "ROOM", ROOM)
    monkeypatch.setattr(exchange, "LOOKS", 3)
    inboxes = tuple(torch.zeros(2, request.param, ROOM, dtype=torch.int64) for _ in range(request.param))
    return [Exchange(rank, inboxes, overlap=False, tries=1) for rank in range(request.param)]


def exchanged(ranks, run):
    """What `run(exchange)` gives, of every rank."""
    before = [rank.counts.clone() for rank in ranks]
    for rank, counts in zip(ranks, before, strict=True):
        rank.tries = 0
        run(rank)
        rank.counts.copy_(counts)
        rank.tries = 1
    return [run(rank) for rank in ranks]


@pytest.mark.parametrize("width", [1, 16])
def test_a_sum_has_the_bits_of_its_definition_whatever_its_width(ranks, normal, width):
    """One after the other, so that both halves of the inboxes serve, and with another number of programs each."""
    numbers = normal(16, len(ranks) + 1, 3) * 10.0 ** torch.arange(len(ranks) + 1)[:, None]
    for start in range(0, 16, width):
        rows = numbers[start : start + width]
        parts = [rows[:, 1 + rank].contiguous() for rank in range(len(ranks))]
        to = rows[:, 0].contiguous()
        expected = to
        for part in parts:
            expected = expected + part
        found = exchanged(ranks, lambda rank: rank.add(parts[rank.rank], to, torch.empty_like(to)))  # noqa: B023
        assert all(torch.equal(each, expected) for each in found)


def test_a_sum_may_be_written_over_what_it_is_added_to(ranks, normal):
    part, to = normal(1, 100), normal(1, 100)
    streams = [to.clone() for _ in ranks]
    for rank in ranks:  # alone: a first run would add twice
        rank.tries = 0
        rank.add(part, to, torch.empty_like(to))
        rank.counts.zero_()
        rank.tries = 1
    expected = to
    for rank, stream in zip(ranks, streams, strict=True):
        rank.add(part, stream, stream)
        expected = expected + part
    assert all(torch.equal(stream, expected) for stream in streams)


@pytest.mark.parametrize("whole", [37, 40])
def test_columns_stand_side_by_side_without_those_that_nobody_has(ranks, normal, whole):
    numbers, part = normal(5, whole), -(-whole // len(ranks))
    own = [numbers[:, rank * part : (rank + 1) * part] for rank in range(len(ranks))]
    found = exchanged(ranks, lambda rank: rank.gather(own[rank.rank], part, whole))
    assert all(torch.equal(each, numbers) for each in found)


def test_whole_numbers_of_the_first_rank_come_to_all(ranks):
    numbers = torch.arange(-50, 70, dtype=torch.int32) * 10_000_019
    found = exchanged(ranks, lambda rank: rank.spread(None if rank.rank else numbers, 120))
    assert all(torch.equal(each, numbers) for each in found)


def test_a_count_that_begins_again_is_no_other_than_the_next(ranks, normal):
    """After 2 ** 32 exchanges; with counts of 32 bits that is a matter of days."""
    part, to = normal(1, 10), torch.zeros(1, 10)
    for rank in ranks:
        rank.counts.fill_(2**31 - 2)
    for _ in range(4):
        found = exchanged(ranks, lambda rank: rank.add(part, to, torch.empty_like(to)))
        expected = to
        for _ in ranks:
            expected = expected + part
        assert all(torch.equal(each, expected) for each in found)
    assert int(ranks[0].counts[0]) == 2 - 2**31


def test_what_did_not_come_is_not_waited_for_when_it_is_tried(ranks, normal):
    """Words of an exchange before are no answer."""
    part, to = normal(1, 10), torch.zeros(1, 10)
    exchanged(ranks, lambda rank: rank.add(part, to, torch.empty_like(to)))
    first = ranks[0]
    assert not torch.equal(first.add(part, to, torch.empty_like(to)), part * len(ranks))


def test_only_what_is_not_too_long_is_carried(ranks):
    assert [ranks[0].carries(count) for count in (0, 1, 16 * ROOM, 16 * ROOM + 1)] == [False, True, True, False]
