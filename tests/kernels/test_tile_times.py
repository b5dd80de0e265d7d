"""Times of linears by tile on a GPU, printed for whoever writes the table: `pytest -m gpu -s` on this file."""

from __future__ import annotations

import pytest
import torch

CUDA = torch.device("cuda")
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_the_table_holds_what_is_fast(rows):
    """All linears of an 8B shape: the table's choice within a tenth of the best that was tried."""
    from outrider.kernels.triton.linear import choose
    from outrider.kernels.triton.tune import candidates, tune

    chosen_time = best_time = 0.0
    for name, shape in SHAPES.items():
        chosen = choose(rows, shape[0])
        times = tune(rows, *shape, CUDA, [chosen, *(tile for tile in candidates(rows) if tile != chosen)])
        own = next(seconds for seconds, tile in times if tile == chosen)
        layers = 1 if name == "head" else 32
        chosen_time, best_time = chosen_time + layers * own, best_time + layers * times[0][0]
        print(f"\n{rows} rows, {name} {shape}: {own * 1e6:.1f} us, {2 * shape[0] * shape[1] / own / 1e12:.2f} TB/s")
        for seconds, tile in times[:4]:
            print(f"  {seconds * 1e6:8.1f} us  {tile}")
    print(f"\n{rows} rows, all linears: {chosen_time * 1e3:.2f} ms, best tiles {best_time * 1e3:.2f} ms")
    assert chosen_time <= 1.1 * best_time
