"""Ranks that write into each other's memory, at their own pace: nobody reads too early, nothing is written over."""

from __future__ import annotations

import pytest

from tests.ranks.processes import start


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_exchanges_of_many_sizes_give_what_they_should(tmp_path, size: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux on x86-64)")
    job = start(tmp_path, size, "linked", TRITON_INTERPRET="1")
    assert job.wait(100) == [0] * size, "\n".join(job.said(rank)[-3000:] for rank in range(size))
    for rank in range(size):
        found = job.told(f"exchanges-{rank}")
        assert set(found) == {"add", "columns", "take"}
        assert all(right and all(right) for right in found.values())
