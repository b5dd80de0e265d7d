"""A draft head's verbs as graphs: padded rows disturb nobody, and grown buffers bring graphs of their own."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.base import KeyIndex
from outrider.kernels.plain import PlainKernels
from outrider.models.heads.stage import Rows, Stage
from tests.models.test_graph import Replayed

CPU = torch.device("cpu")
SHAPES = {"x": (6,), "normed": (6,), "qkv": (3 * 4,), "q": (1, 4), "mixed": (1, 4)}


def make_stage(device=CPU, kernels=None) -> tuple[Stage, torch.Tensor]:
    """Norm, linear, rotation, attention over keys of its own, and back into x -> the stage and its keys."""
    kernels = kernels or PlainKernels(device)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    weight, cos, sin, pages = kernels.pack(normal(12, 6)), normal(40, 2), normal(40, 2), torch.zeros(2, 60, 1, 4)
    norm, back, pages = normal(6), kernels.pack(normal(6, 4)), pages.to(device)

    def body(b, rows: Rows) -> None:
        kernels.rms_norm(b["x"], norm, 1e-5, out=b["normed"])
        weight(b["normed"], out=b["qkv"])
        kernels.rotate_and_write(b["qkv"], cos, sin, rows.positions, rows.slots, *pages, 1, out=b["q"])
        mixed = kernels.attention(b["q"], *pages, rows.keys, 0.5, out=b["mixed"])
        back(mixed.flatten(1), residual=b["x"], out=b["x"])

    return Stage(kernels, device, SHAPES, body), pages


def outputs(stage: Stage, device=CPU) -> list[torch.Tensor]:
    """A text of 30 in passes of several widths, one of them wider than all before."""
    x, found, start = torch.randn(30, 6, generator=torch.Generator().manual_seed(1)).to(device), [], 0
    table = torch.arange(1, 14, dtype=torch.int32, device=device)[None]
    for count in (3, 1, 2, 3, 20, 1):
        positions = torch.arange(start, start + count, dtype=torch.int32, device=device)
        length = positions + 1
        keys = KeyIndex(table, torch.zeros_like(positions), length, torch.zeros_like(positions)[:, None], length, 4)
        stage.room(count)["x"].copy_(x[start : start + count])
        stage.run(Rows(positions, positions + 4, keys))
        found.append(stage.room(count)["x"].clone())
        start += count
    return found


def test_a_replayed_stage_has_the_bits_of_one_that_runs_as_it_is():
    plain, pages = make_stage()
    expected = outputs(plain)
    stage, own = make_stage()
    stage._graphs = Replayed()
    for _ in range(2):
        found = outputs(stage)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert torch.equal(own[:, 1:], pages[:, 1:]), "slot 0 belongs to nobody"
    assert stage._graphs.captures == 4, "32 rows, and 1, 2 and 4 anew over the buffers that had grown for them"


@pytest.mark.gpu
def test_on_a_gpu_a_stage_has_the_bits_of_one_that_runs_as_it_is():
    from outrider.kernels import select

    device = torch.device("cuda")
    kernels = select("triton", device)
    plain, _ = make_stage(device, kernels)
    plain._graphs = None
    expected = outputs(plain, device)
    stage, _ = make_stage(device, kernels)
    for _ in range(2):
        found = outputs(stage, device)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert stage._graphs is not None
    assert stage._graphs.note is None
