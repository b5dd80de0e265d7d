"""A level's rows that are warped by a kernel in one call rank as those that PyTorch warps one at a time."""

from __future__ import annotations

import pytest
import torch

from outrider.drafters.candidates import Candidates, Place
from outrider.sampling.automaton import TokenAutomaton
from outrider.sampling.context import Context
from tests.kernels.conftest import make as kernels_named
from tests.laws import make

VOCAB = 13
SETTINGS = (
    {"temperature": 1.0, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 1.0},
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 0.7, "top_k": 4, "min_tokens": 9},
    {"temperature": 1.0, "automaton": TokenAutomaton(0, {0: {3: 0, 4: 0, 5: 0}})},
)


def places(kernels: object) -> list[Place]:
    contexts = [Context(make(prompt=(1, 2), seed=7, **each), VOCAB, kernels=kernels) for each in SETTINGS]
    for context in contexts:
        context.request.output += [3, 4, 4]
    return [Place(context, path) for context in contexts for path in ((), (4, 5))]


@pytest.mark.parametrize("kept", [None, torch.tensor([0, 2, 3, 4, 5, 8, 11])], ids=["whole", "trimmed"])
def test_rows_warped_together_rank_as_rows_warped_one_by_one(kept: torch.Tensor | None) -> None:
    logits = torch.randn(
        2 * len(SETTINGS), VOCAB if kept is None else len(kept), generator=torch.Generator().manual_seed(3)
    )
    before = logits.clone()
    candidates = Candidates(kernels_named("plain"), VOCAB, kept)
    together, alone = places(kernels_named("triton")), places(None)
    assert sum(place.context.warper is not None for place in together) == len(together)
    assert candidates.best(logits, together, 3) == candidates.best(logits, alone, 3)
    laws, expected = candidates._laws(logits, together), candidates._laws(logits, alone)
    assert torch.allclose(laws, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(logits, before)
