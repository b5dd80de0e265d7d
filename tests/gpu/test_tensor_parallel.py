"""On two GPUs or four: all that holds for ranks on a CPU, and what two cards bring for the shape of an 8B."""

from __future__ import annotations

import pytest
import torch

from outrider.measure.shared import measure_shared, read_bytes
from tests.ranks.processes import Job, start

pytestmark = pytest.mark.gpu
BAR, SHARE = 1.5, 0.7
"""Several cards against one, plain, at batch 1; of the joint read limit of a 70B shape: issue 7."""


def shown(line: str) -> None:
    print(line, flush=True)


def needs(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_gpus_keep_what_ranks_on_a_cpu_keep(tmp_path, size: int) -> None:
    """Bits of sums and rows at widths 1, 16 and 64; texts with guesses and without, in lockstep and in the air."""
    needs(size)
    job: Job = start(tmp_path, size, "engine", 200, DEVICE="cuda")
    assert job.wait(500) == [0] * size, "\n".join(job.said(rank)[-3000:] for rank in range(size))
    told = job.told("told")
    for rank in range(size):
        assert all(all(pair) for pair in job.told(f"sums-{rank}").values())
        assert set(job.told(f"kept-{rank}")["bits"].values()) == {1}
    assert told["rows"] == {"1": True, "16": True, "64": True}
    for kind in ("lean", "biased", "module"):
        assert all(found["same"] for found in told[kind].values())
    books = [(tmp_path / f"books-{rank}.txt").read_text() for rank in range(size)]
    assert all(kept == books[0] for kept in books)


@pytest.mark.parametrize("size", [2, 4])
def test_cycles_of_ranks_are_captured_whole_and_change_no_text(tmp_path, size: int) -> None:
    needs(size)
    job = start(tmp_path, size, "captured", DEVICE="cuda")
    assert job.wait(300) == [0] * size, "\n".join(job.said(rank)[-3000:] for rank in range(size))
    told = job.told("told")
    shown(str(told))
    assert told.pop("note") is None, "ranks do not reach each other's memory"
    assert all(found["same"] for found in told.values())
    assert all(found["graphs"] and found["note"] is None for found in told.values())


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_ends_the_job_on_gpus(tmp_path, size: int) -> None:
    needs(size)
    job = start(tmp_path, size, "endless", DEVICE="cuda")
    try:
        job.told("runs")
        job.ranks[1].kill()
        assert job.code(0, 15) == 1
    finally:
        job.stop()
    assert job.sentences(0) == [f"outrider: rank 1 of {size} is gone: the job ends here, start it again"]


@pytest.mark.parametrize("cards", [2, 4])
def test_several_cards_against_one_for_an_8b(cards: int) -> None:
    """Plain decoding of one text at a time, and chains of guesses; every figure is printed as it comes."""
    needs(cards)
    found = {count: measure_shared("8b", count, shown) for count in (1, cards)}
    rates = [found[count]["plain"]["tokens_per_second"] for count in (1, cards)]
    ratios = [found[count]["speculative"]["ratio"] for count in (1, cards)]
    shown(
        f"8B shape, batch 1: plain {rates[0]:.1f} tokens/s on one card, {rates[1]:.1f} on {cards} "
        f"({rates[1] / rates[0]:.2f}x); speculative to plain {ratios[0]:.2f} and {ratios[1]:.2f}"
    )
    assert all(figures["texts"]["differing"] == 0 for figures in found.values())
    assert rates[1] >= BAR * rates[0]
    assert ratios[1] >= 0.9 * ratios[0]


@pytest.mark.parametrize("cards", [2, 4])
def test_a_70b_shape_on_several_cards(cards: int) -> None:
    needs(cards)
    part = read_bytes("70b", 2) // cards + 8 * 2**30  # keys, the embedding and the head beside it
    if min(torch.cuda.mem_get_info(card)[0] for card in range(cards)) < part:
        pytest.skip(f"a part of the 70B shape takes {part / 2**30:.0f} GiB")
    found = measure_shared("70b", cards, shown, tokens=96)
    took, share = found["plain"]["milliseconds"], found["plain"]["share_of_limit"]
    shown(f"70B shape on {cards} cards: {took:.2f} ms a token, {share:.0%} of the joint read limit")
    assert share >= SHARE
