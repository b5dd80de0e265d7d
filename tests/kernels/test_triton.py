"""Triton's kernels on a GPU against their plain twins, and the sentences of a machine where they cannot run."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from outrider.errors import KernelError
from outrider.kernels import select, self_test
from outrider.kernels.plain import PlainKernels
from tests.kernels.test_attention import LENGTHS, OPTIONS, SHAPES, SLOTS, assert_near, make_keys
from tests.kernels.test_draw import ROWS, golden, keyed

CPU = torch.device("cpu")


def test_a_machine_without_a_gpu_is_told(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelError, match="kernels='auto'"):
        select("triton", CPU)


def test_without_the_package_auto_is_plain_and_triton_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "outrider.kernels.triton", None)
    kernels = select("auto", torch.device("cuda"))
    assert kernels.name == "plain"
    assert "many times slower" in kernels.note
    with pytest.raises(KernelError, match="kernels='plain'"):
        select("triton", torch.device("cuda"))


@pytest.fixture(scope="module")
def gpu():
    return torch.device("cuda")


@pytest.fixture(scope="module")
def kernels(gpu):
    return select("triton", gpu)


def moved(keys, device):
    names = ("tables", "request", "linear", "tails", "length")
    return replace(keys, **{name: getattr(keys, name).to(device) for name in names})


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "causal")
@pytest.mark.parametrize(("heads", "kv", "dim", "pages"), [*SHAPES, (32, 2, 256, torch.bfloat16)])
def test_attention_on_a_gpu_equals_a_dense_softmax(gpu, kernels, normal, heads, kv, dim, pages, options):
    keys = make_keys()
    q = normal(len(LENGTHS), heads, dim)
    k_pages, v_pages = normal(SLOTS, kv, dim).to(pages), normal(SLOTS, kv, dim).to(pages)
    options = {**options, **({"sinks": normal(heads)} if "sinks" in options else {})}
    there = {name: value.to(gpu) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    tensors = (q.to(gpu), k_pages.to(gpu), v_pages.to(gpu))
    out = kernels.attention(*tensors, moved(keys, gpu), dim**-0.5, **there)
    assert_near(out.cpu(), "triton", q, k_pages, v_pages, keys, dim**-0.5, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [5, 1000, 49152])
def test_draws_on_a_gpu_equal_the_definition(gpu, kernels, vocab):
    logits, seeds, samples, positions = keyed(vocab)
    for temperature in (0.0, 0.7, 1.0):
        warm = torch.full((ROWS,), temperature)
        arguments = [t.to(gpu) for t in (logits, warm, seeds, samples, positions)]
        expected = golden(logits, warm, seeds, samples, positions)
        assert torch.equal(kernels.draw(*arguments).cpu(), expected)
        assert torch.equal(PlainKernels(gpu).draw(*arguments).cpu(), expected)
    arguments[0][1, 3], arguments[0][2] = torch.nan, -torch.inf
    assert kernels.draw(*arguments).tolist()[1:3] == [-1, -1]


@pytest.mark.gpu
def test_every_kernel_on_a_gpu_keeps_the_contract(gpu, kernels):
    assert [outcome for outcome in self_test(kernels, gpu) if not outcome.passed] == []
