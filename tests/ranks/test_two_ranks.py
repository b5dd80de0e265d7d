"""Two processes share a target: bits, texts, books and refusals; one job does it all, as ranks start slowly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.processes import start

CYCLES = 1000


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def told(request, tmp_path_factory) -> dict[str, Any]:
    """What rank 0 found, and by rank what each one wrote down."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    size: int = request.param
    job = start(folder, size, "engine", CYCLES)
    codes = job.wait(280)
    assert codes == [0] * size, "\n".join(job.said(rank)[-3000:] for rank in range(size))
    by_rank = {name: [job.told(f"{name}-{rank}") for rank in range(size)] for name in ("sums", "kept")}
    books = [(folder / f"books-{rank}.txt").read_text().splitlines() for rank in range(size)]
    return {**job.told("told"), **by_rank, "books": books}


def test_a_sum_has_the_same_bits_whatever_rows_share_it(told) -> None:
    """Rows alone, in sixteens and all together; by its definition, too: in the order of ranks, rounded once."""
    for found in told["sums"]:
        assert list(found) == ["1", "16", "64", "rounded once"]
        assert all(all(pair) for pair in found.values())


def test_a_row_has_the_same_bits_whatever_rows_share_its_pass(told) -> None:
    """The logits, and on every rank the keys and values of its own heads."""
    assert told["rows"] == {"1": True, "16": True, "64": True}
    for kept in told["kept"]:
        rows = {row: count for row, count in kept["bits"].items() if int(row.split()[0]) >= 64}
        assert len(rows) == 64
        assert set(rows.values()) == {1}, "some row left other keys or values in other company"


def test_the_parts_compute_what_the_whole_does(told) -> None:
    assert told["distance"] < 1e-4
    assert "exactness='seed'" in told["report"] or "'exactness': 'seed'" in told["report"]
    assert any(line.startswith("tensor_parallel") for line in told["lines"])


def test_orders_that_were_kept_are_told_when_they_are_repeated(told) -> None:
    assert told["repeated"] == [1 << 60] * 2  # what the others say in `tests.ranks.job`


@pytest.mark.parametrize("kind", ["lean", "biased", "module"])
def test_guesses_change_no_text(told, kind: str) -> None:
    for drafter, found in told[kind].items():
        assert found["same"], f"{drafter} changed a text or what is told of it"
        assert found["way"] == ("module" if kind == "module" else "lean")
    assert any(found["accepted"] for found in told[kind].values()), "no guess was ever right"


def test_paths_that_the_device_alone_knows_are_followed_by_every_rank(told) -> None:
    """Cycles in the air, of trees with siblings."""
    counts = {kept["followed"] for kept in told["kept"]}
    assert len(counts) == 1
    assert counts.pop() >= 5


def test_every_rank_knows_the_same_ids_in_every_cycle(told) -> None:
    """1,000 cycles, with a rank that has so little memory that requests give way, up to the end of the context."""
    books, found = told["books"], told["long"]
    assert found["cycles"] >= CYCLES
    assert found["preemptions"] > 0
    assert found["ends"] == [96], "not every text went to the end of the context"
    assert all(kept == books[0] for kept in books)
    # Of the stack of that run; block 0 is nobody's, and read by the passes that are timed at start.
    kept, last = (
        [line for line in book if line.startswith(f"{found['slots']} ") and line.split(" ")[1] != "0"]
        for book in (books[0], books[-1])
    )
    assert len(kept) >= found["cycles"]
    assert not any("-1" in line for line in kept), "a rank was to know an id that it never ran"
    # Every text is put together again from what the last rank came to know.
    texts: dict[str, list[int]] = {}
    whole = set()
    for line in last:
        _, block, since, ids = line.split(" ", 3)
        known = texts.setdefault(block, [])
        known[int(since) :] = [int(word) for word in ids.strip("[]").split(", ") if word]
        whole.add(tuple(known))
    # The last cycle's guesses, and the token that it drew, are no longer read by a pass.
    assert all(any(tuple(text[:end]) in whole for end in range(90, 96)) for text in found["texts"])


def test_what_cannot_be_shared_is_refused_and_the_ranks_go_on(told) -> None:
    said = told["refusals"]
    assert "does not divide the 4 attention heads and 1 key-value heads" in said["heads"]
    assert said["plan"].startswith("ModelError: GPT2LMHeadModel has no tensor-parallel plan")
    assert said["packed"].startswith("ModelError: packed weights are not shared")
    assert said["elsewhere"].startswith("RankError: rank 1 of ")
    assert said["elsewhere"].endswith("they are not on this machine")
    assert said["size"].startswith("ConfigError: tensor_parallel=")
    assert said["device"].startswith("ConfigError: device='cpu:0' is one for all ranks")
