"""The page for contributors tells the truth: its example, as printed there, is a drafter that changes no text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.drafters.base import Drafter, Workshop
from outrider.registry import DRAFTERS
from outrider.request import SamplingParams
from tests import toy

PAGE = (Path(__file__).parents[1] / "docs" / "add_a_drafter.md").read_text()


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The example's file, imported through the example's line in the registry."""
    source, line = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    name, path = re.fullmatch(r'"(\w+)": "([\w.:]+)",\n', line).groups()
    (tmp_path / "follower.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert path == f"outrider.drafters.{name}:Follower"
    monkeypatch.setitem(DRAFTERS._entries, name, f"{name}:Follower")
    return name


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_example_changes_no_text_and_is_right_in_loops(follower: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=60)
    texts, tallies = [], []
    for drafter in ("none", follower):
        requests = [toy.make_request(i, [i + 1, 7, i + 1], params) for i in range(4)]
        texts.append(toy.run(toy.make_engine(drafter), requests))
        tallies.append(sum(request.tally.drafted for request in requests))
    assert texts[0] == texts[1]
    assert tallies[0] == 0
    assert tallies[1] > 0


def test_the_example_guesses_what_followed_the_last_time(follower: str) -> None:
    drafter: Drafter = DRAFTERS[follower](Workshop(None, None))  # type: ignore[arg-type]
    engine = toy.make_engine(follower, depth=5)
    request = toy.make_request(0, [1, 2, 3, 1, 2], SamplingParams(max_tokens=9))
    engine.drafter = drafter
    asked = []
    propose = drafter.propose
    drafter.propose = lambda asks: asked.append((asks[0].request.tokens(0, 99), trees := propose(asks))) or trees  # type: ignore[method-assign]
    toy.run(engine, [request])
    known, (tree,) = asked[0]
    if known[-1] in known[:-1]:
        last = len(known) - 2 - known[-2::-1].index(known[-1])
        assert tree.tokens[0] == known[last + 1]


def test_every_verb_of_the_door_is_on_the_page() -> None:
    verbs = {name for name, value in vars(Drafter).items() if callable(value) and not name.startswith("_")}
    assert verbs == set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE))
