"""Weights in large pages are the same weights, line up with cache lines, and share blocks."""

from __future__ import annotations

import mmap

import pytest
import torch

from outrider.kernels import large_pages
from outrider.kernels.large_pages import ALIGNED, LargePages

HAS_THEM = hasattr(mmap, "MADV_HUGEPAGE")


@pytest.mark.skipif(not HAS_THEM, reason="this system has no such pages to ask for")
def test_what_is_kept_is_the_same_and_lies_in_few_blocks(monkeypatch):
    monkeypatch.setattr(large_pages, "BLOCK", 1 << 20)
    memory, made = LargePages(), torch.Generator().manual_seed(0)
    given = [
        torch.randint(0, 256, (rows, 100), dtype=torch.uint8, generator=made) for rows in (30, 7, 9_000, 20_000, 3)
    ]
    given.append(torch.randn(50, 6, generator=made).to(torch.bfloat16))
    kept = [memory.keep(tensor) for tensor in given]
    for before, after in zip(given, kept, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(before, after)
        assert after.data_ptr() % ALIGNED == 0
        assert after.data_ptr() != before.data_ptr()
    # Three of them fill the first block, the fourth is larger than any; what lies in one block cannot overlap.
    places = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in kept]
    assert all(a[1] <= b[0] or b[1] <= a[0] for a in places for b in places if a is not b)
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept}) == 3


def test_without_them_a_tensor_stays_where_it_is(monkeypatch):
    tensor = torch.arange(5)
    monkeypatch.setattr(large_pages, "_block", lambda size: None)
    assert LargePages().keep(tensor) is tensor
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert LargePages().keep(tensor) is tensor
