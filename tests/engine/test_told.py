"""Traces of cycles: p and q against the toy's own laws, verdicts against the text, and no text depends on them."""

from __future__ import annotations

import pytest
import torch

from outrider.request import SamplingParams
from tests import toy

PROMPT = (3, 5, toy.NEWLINE, 3, 5)


def traced(drafter: str, temperature: float, acceptance: str = "match", **settings):
    """A request with its trace, and its text without one."""
    params = SamplingParams(temperature=temperature, max_tokens=60, trace=True)
    request = toy.make_request(0, PROMPT, params)
    toy.run(toy.make_engine(drafter, acceptance=acceptance, **settings), [request])
    silent = toy.make_request(0, PROMPT, SamplingParams(temperature=temperature, max_tokens=60))
    toy.run(toy.make_engine(drafter, acceptance=acceptance, **settings), [silent])
    assert request.output == silent.output
    assert silent.cycles == []
    return request


def chance(tokens: list[int], token: int, temperature: float) -> float:
    """Of a token after these, by the toy's law."""
    logits = toy.law(tokens).double()
    return float(logits.argmax() == token) if temperature == 0 else float(torch.softmax(logits / temperature, 0)[token])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("drafter", "width"), [("small_model", 1), ("small_model", 3), ("suffix", 2), ("none", 1)])
def test_every_chance_is_the_laws_and_every_verdict_the_walks(drafter, width, temperature) -> None:
    request = traced(drafter, temperature, width=width, depth=4)
    known, seen = list(PROMPT), 0
    for cycle in request.cycles:
        paths: list[list[int]] = []
        for node in cycle.nodes:
            above = paths[node.parent] if node.parent >= 0 else []
            paths.append([*above, node.token])
            assert node.p == pytest.approx(chance(known + above, node.token, temperature), abs=1e-6)
            assert node.q is None  # under the match rule drafters name no law
        accepted = [i for i, node in enumerate(cycle.nodes) if node.verdict == "accepted"]
        path = paths[accepted[-1]] if accepted else []
        said = request.output[seen : seen + len(path) + 1]
        assert [*path, cycle.drawn][: len(said)] == said  # the last cycle may be cut by the limit
        for i, node in enumerate(cycle.nodes):
            stood = node.parent < 0 or cycle.nodes[node.parent].verdict == "accepted"
            assert node.verdict == ("accepted" if i in accepted else "rejected" if stood else "unreached")
        assert cycle.p == pytest.approx(chance(known + path, cycle.drawn, temperature), abs=1e-6)
        known += said
        seen += len(said)
    assert seen == len(request.output)
    assert sum(len(cycle.nodes) for cycle in request.cycles) == request.tally.drafted
    assert bool(request.tally.drafted) == (drafter != "none")


def test_under_the_rejection_rule_q_is_the_law_that_was_drawn_from() -> None:
    """The toy's small model is the target itself, so that q is p."""
    request = traced("small_model", 0.7, "rejection", width=1, depth=3)
    nodes = [node for cycle in request.cycles for node in cycle.nodes]
    assert len(nodes) > 20
    assert [node.q for node in nodes] == [pytest.approx(node.p, abs=1e-5) for node in nodes]


def test_a_request_may_want_fewer_children() -> None:
    for width in (1, 2):
        params = SamplingParams(temperature=1.0, max_tokens=40, trace=True, width=width)
        request = toy.make_request(0, PROMPT, params)
        toy.run(toy.make_engine("small_model", width=3, depth=2), [request])
        most = max(
            [c.parent for c in cycle.nodes].count(parent)
            for cycle in request.cycles
            for parent in {node.parent for node in cycle.nodes}
        )
        assert most == width
