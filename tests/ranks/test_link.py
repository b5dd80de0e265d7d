"""Where ranks do not reach each other's memory they add up another way, and a note says why."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import RankError
from outrider.models.ranks import link


def test_ranks_on_cpus_have_no_such_memory_and_nothing_to_say() -> None:
    assert link.connect(0, 2, torch.device("cpu"), lambda error: error) == (None, None)


@pytest.mark.parametrize("step", ["_refuse", "_own", "_opened", "_compiled", "_tried"])
def test_whatever_fails_is_agreed_on_before_anybody_waits(monkeypatch, step: str) -> None:
    ran = []

    def done(name):
        def run(*_given):
            ran.append(name)
            if name == step:
                raise RankError("it is not here\nand more")
            return (), None

        return run

    for name in ("_refuse", "_own", "_opened", "_compiled", "_tried"):
        monkeypatch.setattr(link, name, done(name))
    agreed = []
    found = link.connect(0, 2, torch.device("cuda:0"), lambda error: agreed.append(error) or error)
    assert found == (None, "ranks add up by way of a library, slower: it is not here")
    assert len(agreed) == len(ran)
    assert ran[-1] == step


def test_a_step_that_failed_elsewhere_ends_it_here_too(monkeypatch) -> None:
    monkeypatch.setattr(link, "_refuse", lambda *given: None)
    lost = RankError("rank 1 of 2: no driver")
    exchange, note = link.connect(0, 2, torch.device("cuda:0"), lambda _: lost)
    assert exchange is None
    assert note == "ranks add up by way of a library, slower: rank 1 of 2: no driver"
