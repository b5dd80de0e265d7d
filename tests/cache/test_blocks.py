"""Blocks and ledger under random use: no slot owned twice, none lost, prefixes found only where they are equal."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.blocks import TRASH_BLOCK, BlockPool
from outrider.cache.ledger import Ledger
from outrider.cache.pages import Pages, PageSpec


def key(number: int) -> tuple[int, str]:
    return (number, "target")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), num_blocks=st.integers(4, 24), block_size=st.integers(1, 4))
def test_random_use_keeps_the_books(seed: int, num_blocks: int, block_size: int) -> None:
    """Open, reserve, draft, commit, roll back, close at random; contents of cached prefixes are checked by tokens."""
    rng = random.Random(seed)
    ledger = Ledger(BlockPool(num_blocks, block_size), ("small",))
    written: dict[int, int] = {}  # slot -> token whose keys it holds
    tokens: dict[int, list[int]] = {}
    for number in range(120):
        choice = rng.random()
        if choice < 0.3 or not tokens:
            sequence = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
            cached = ledger.open(key(number), sequence)
            assert cached < len(sequence)
            assert [written[slot] for slot in ledger.slots(key(number), 0, cached)] == sequence[:cached]
            tokens[number] = sequence
        elif choice < 0.8:
            chosen = rng.choice(list(tokens))
            span, sequence = ledger[key(chosen)], tokens[chosen]
            guesses = rng.randint(0, 3)
            before = list(span.table)
            if not ledger.reserve(key(chosen), len(sequence) + guesses):
                assert span.table == before
                continue
            rows = len(sequence) - span.committed + guesses
            ledger.draft(key(chosen), rows)
            accepted = rng.randint(0, guesses)
            sequence += [rng.randrange(2) for _ in range(accepted)]
            for index, slot in enumerate(ledger.slots(key(chosen), span.committed, span.drafted), span.committed):
                shared = ledger.pool._refs[slot // block_size] > 1
                assert not shared, "a guess would write a shared block"
                written[slot] = sequence[index] if index < len(sequence) else -1
            ledger.commit(key(chosen), sequence, len(sequence))
            ledger.saw(key(chosen), "small", rng.randint(span.seen["small"], span.committed))
            sequence.append(rng.randrange(2))
        else:
            chosen = rng.choice(list(tokens))
            ledger.close(key(chosen))
            del tokens[chosen]
        ledger.check()
    for chosen in tokens:
        ledger.close(key(chosen))
    ledger.check()
    assert ledger.pool.num_available == num_blocks - 1


def test_the_trash_block_is_never_given_away() -> None:
    pool = BlockPool(5, 4)
    blocks = pool.allocate(4)
    assert blocks is not None
    assert TRASH_BLOCK not in blocks
    assert pool.allocate(1) is None


def test_a_prefix_is_reused_only_where_all_before_it_is_equal() -> None:
    ledger = Ledger(BlockPool(20, 2))
    ledger.open(key(0), [1, 2, 3, 4, 5])
    ledger.reserve(key(0), 5)
    ledger.draft(key(0), 5)
    ledger.commit(key(0), [1, 2, 3, 4, 5], 5)
    ledger.close(key(0))
    assert ledger.open(key(1), [1, 2, 3, 4, 9]) == 4
    assert ledger.open(key(2), [9, 2, 3, 4, 9]) == 0
    assert ledger.open(key(3), [1, 2, 3, 4]) == 2  # the last token always runs
    assert ledger.open(key(4), [1, 2, 3, 4, 9], reuse=False) == 0


def test_a_drafters_stack_is_valid_only_over_the_blocks_it_saw() -> None:
    ledger = Ledger(BlockPool(20, 2), ("small",))
    ledger.open(key(0), [1, 2, 3, 4, 5])
    ledger.reserve(key(0), 5)
    ledger.draft(key(0), 5)
    ledger.commit(key(0), [1, 2, 3, 4, 5], 5)
    ledger.saw(key(0), "small", 3)
    ledger.close(key(0))
    ledger.open(key(1), [1, 2, 3, 4, 5])
    assert ledger[key(1)].committed == 4
    assert ledger[key(1)].seen["small"] == 2


@settings(max_examples=150, deadline=None)
@given(data=st.data(), size=st.integers(1, 4), prefix_cache=st.booleans())
def test_tokens_that_are_replaced_leave_no_key_behind(data: st.DataObject, size: int, prefix_cache: bool) -> None:
    """Texts whose ends change: what a slot holds is told by what was written there last, and always by the text."""
    ledger = Ledger(BlockPool(40, size), ("small",), prefix_cache)
    written: dict[int, tuple[int, ...]] = {}  # by slot: the tokens up to the one whose key it holds
    texts: dict[int, list[int]] = {}
    for number in data.draw(st.lists(st.integers(0, 3), max_size=40)):
        if number in texts and data.draw(st.integers(0, 9)) == 0:
            ledger.close(key(number))
            del texts[number]
            continue
        before = texts.get(number, [])
        stays = data.draw(st.integers(0, len(before)))
        text = [*before[:stays], *data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))][:24]
        if number in texts:
            same = next((i for i, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), stays)
            ledger.roll_back(key(number), min(same, len(text) - 1))
        else:
            ledger.open(key(number), text)
        texts[number] = text
        if not ledger.reserve(key(number), len(text)):
            continue
        start = ledger[key(number)].committed
        for place, slot in enumerate(ledger.slots(key(number), start, len(text)), start):
            written[slot] = tuple(text[: place + 1])
        ledger.draft(key(number), len(text) - start)
        ledger.commit(key(number), text, len(text))
        ledger.check()
        for other, known in texts.items():
            span = ledger[key(other)]
            for place, slot in enumerate(ledger.slots(key(other), 0, span.committed)):
                assert written[slot] == tuple(known[: place + 1])
    for number in texts:
        ledger.close(key(number))
    ledger.check()
    assert ledger.pool.num_held == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compact_moves_every_layer_and_may_overlap(dtype: torch.dtype) -> None:
    pages = Pages([PageSpec(2, 3, 5)] * 2, 8, dtype, torch.device("cpu"))
    for tensor in (*pages.keys, *pages.values):
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in (*pages.keys, *pages.values)]
    pages.compact([3, 5, 4], [2, 3, 5])
    for tensor, old in zip((*pages.keys, *pages.values), before, strict=True):
        assert torch.equal(tensor[[2, 3, 5]], old[[3, 5, 4]])
        assert torch.equal(tensor[[0, 1, 4, 6, 7]], old[[0, 1, 4, 6, 7]])
