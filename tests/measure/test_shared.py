"""A shape that ranks share is measured with weights that each of them makes by itself."""

from __future__ import annotations

import pytest
import torch

from outrider.measure.shared import SHAPES, measure_shared, random_part, read_bytes


def test_the_bytes_of_a_pass_are_those_of_all_weights_but_the_embedding() -> None:
    part = random_part("tiny", torch.device("cpu"), None)
    body, shape = part.body, SHAPES["tiny"]
    tables = sum(table.nbytes for table in body.rotary())
    assert read_bytes("tiny", 4) == body.nbytes - tables - 4 * shape.vocab_size * shape.hidden


@pytest.mark.slow
def test_two_processes_are_measured_beside_one() -> None:
    lines: list[str] = []
    for cards in (1, 2):
        settings = {"device": "cpu", "tokens": 12, "depth": 2, "tau": 2.0, "buffer": 1 << 20}
        found = measure_shared("tiny", cards, lines.append, **settings)
        assert {"made", "limit", "plain", "speculative"} <= set(found)
        assert found["texts"] == {"what": "texts", "compared": 2, "differing": 0}
        assert found["speculative"]["tau"] == pytest.approx(2.0, abs=0.2)
        assert found["limit"]["bytes_of_a_pass"] == read_bytes("tiny", 4)
    assert len(lines) >= 10
