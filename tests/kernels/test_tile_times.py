"""Tiles of linears: which are tried, the table written of them, and their times on a GPU (`pytest -m gpu -s`)."""

from __future__ import annotations

import time

import pytest
import torch

from outrider.kernels.plain import PlainKernels
from outrider.measure.tune import AHEAD, SHAPES, SHARED_MEMORY, Tuned, Tuner, candidates, random_model, table, tune_all

CPU = torch.device("cpu")
ROWS = (1, 2, 4, 8, 16, 32, 64)


@pytest.fixture
def linear():
    pytest.importorskip("triton")
    from outrider.kernels.triton import linear

    return linear


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inputs", [64, 576, 4096])
def test_candidates_are_many_and_fit_the_hardware(linear, rows, inputs):
    found = candidates(rows, inputs)
    assert len(found) == len(set(found))
    assert len(found) >= (12 if inputs > 64 else 1)
    for tile in found:
        assert tile.rows >= 8
        assert tile.rows < 2 * max(rows, 8) + 1
        assert tile.inputs <= inputs
        assert (tile.stages - 1) * (tile.outputs + tile.rows) * tile.inputs * 2 <= SHARED_MEMORY


def test_the_table_that_is_printed_can_be_pasted(linear):
    """Neighbours that are as fast by one tile share it, and each shape finds a tile that was fast for it."""
    a, b, c = linear.Tile(16, 16, 256, 4, 4), linear.Tile(32, 16, 128, 2, 6), linear.Tile(64, 16, 128, 4, 5)
    found = [
        Tuned("8b", "o", 1, (4096, 4096), seconds={b: 1.0, a: 1.001, c: 2.0}),
        Tuned("8b", "down", 1, (4096, 14336), seconds={a: 1.0, b: 1.5}),
        Tuned("8b", "qkv", 1, (6144, 4096), seconds={c: 1.0, a: 1.5}),
        Tuned("8b", "o", 8, (4096, 4096), seconds={c: 1.0}),
    ]
    text = table(found)
    tiles = eval(f"({text})", {"Tile": linear.Tile, "ANY": linear.ANY})
    assert tiles == (
        (1, ((4096, 14336, a), (6144, 4096, c), (linear.ANY, linear.ANY, c))),
        (8, ((4096, 4096, c), (linear.ANY, linear.ANY, c))),
    )


def test_roles_are_tuned_one_after_the_other_in_a_model_that_runs(linear):
    """Plain kernels know no tiles: all are alike, and one is the fastest."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = random_model(SHAPES["135m"], PlainKernels(CPU), CPU, **sizes, num_hidden_layers=1, vocab_size=64)
    tried = [linear.Tile(16, 16, 64, 4, 4), linear.Tile(32, 16, 64, 2, 3)]
    tuner = Tuner("tiny", model, CPU, lambda rows, inputs: tried, context=16)
    found = list(tuner.run((1, 2)))
    assert [(each.role, each.rows) for each in found] == [(role, rows) for rows in (1, 2) for role in model.roles()]
    assert [each.shape for each in found[:5]] == [(64, 32), (32, 32), (96, 32), (32, 48), (64, 32)]
    for each in found[:5]:
        assert {*tried, linear.choose(each.rows, *each.shape)} < set(each.seconds)
        assert {tile.ahead for tile in each.seconds} >= set(AHEAD)
        assert {tile.late for tile in each.seconds} == {True, False}
    assert all(each.differing == [] and each.was > 0 for each in found)
    assert model.roles()["o"][0].tile == found[6].best
    assert list(tuner.run((1,), deadline=time.perf_counter() - 1)) == []
    assert len(tuner.forms((1,))) == 10


@pytest.mark.gpu
def test_the_table_holds_what_is_fast():
    """All linears of three shapes as their layers run: the table's choice within a tenth of the best that was tried."""
    began, found, last = time.perf_counter(), [], {}
    for each in tune_all(torch.device("cuda"), tuple(SHAPES), ROWS, seconds=170):
        found.append(each)
        last[each.model, each.rows] = each
        times = ", ".join(f"{1e6 * taken:.1f} {tile}" for tile, taken in list(each.seconds.items())[:3])
        differing = f"; {len(each.differing)} differ in bits: {each.differing[0]}" if each.differing else ""
        print(
            f"{time.perf_counter() - began:5.0f} s  {each.model}, {each.rows} rows, {each.role} {each.shape}: {times}"
            f"{differing}",
            flush=True,
        )
    print("\n" + table(found))
    for (name, rows), each in last.items():
        best = each.seconds[each.best]
        print(f"{name}, {rows} rows: {1e6 * each.was:.1f} us by the table, {1e6 * best:.1f} by the best tiles")
    assert {name for name, _ in last} == set(SHAPES), "the time did not suffice"
    assert not [each for each in found if each.differing]
    assert all(each.was <= 1.1 * each.seconds[each.best] for each in last.values())
