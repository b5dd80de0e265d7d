"""The page for contributors tells the truth: its examples, as printed there, are drafters that change no text."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from outrider.drafters.base import Ask, Drafter, Workshop
from outrider.registry import DRAFTERS
from outrider.request import SamplingParams
from outrider.tree import ROOT, Budget, DraftTree
from tests import toy

PAGE = (Path(__file__).parents[1] / "docs" / "add_a_drafter.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
"""A drafter's file and its line in the registry, by turns."""
EXAMPLES = ("follower", "bigrams")


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examples' files, imported through the examples' lines in the registry."""
    monkeypatch.syspath_prepend(tmp_path)
    for source, line in zip(BLOCKS[::2], BLOCKS[1::2], strict=True):
        name, module, kind = re.fullmatch(r'"(\w+)": "outrider\.drafters\.(\w+):(\w+)",\n', line).groups()
        assert name == module
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.setitem(DRAFTERS._entries, name, f"{module}:{kind}")


def test_the_page_has_these_examples() -> None:
    assert [DRAFTERS[name].name for name in EXAMPLES] == list(EXAMPLES)
    assert len(BLOCKS) == 2 * len(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_example_changes_no_text_and_is_right_in_loops(name: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=60)
    texts, tallies = [], []
    for drafter in ("none", name):
        requests = [toy.make_request(i, [i + 1, 7, i + 1], params) for i in range(4)]
        texts.append(toy.run(toy.make_engine(drafter, width=3), requests))
        tallies.append([sum(r.tally.drafted for r in requests), sum(r.tally.accepted for r in requests)])
    assert texts[0] == texts[1]
    assert tallies[0] == [0, 0]
    assert min(tallies[1]) > 0


def asked(name: str, tokens: list[int], budget: Budget) -> DraftTree:
    """What an example guesses after these tokens."""
    drafter: Drafter = DRAFTERS[name](Workshop(None, None))  # type: ignore[arg-type]
    request = toy.make_request(0, tokens, SamplingParams())
    drafter.begin(request)
    (tree,) = drafter.propose([Ask(request, None, budget)])  # type: ignore[arg-type]
    return tree


def test_bigrams_rank_what_followed_by_its_count() -> None:
    text = [1, 2, 1, 2, 1, 3, 1]  # after 1 came 2 twice and 3 once; after either came 1
    tree = asked("bigrams", text, Budget(depth=2, width=2, nodes=4))
    assert [tree.tokens[node] for node in tree.children(ROOT)] == [2, 3]
    assert {tree.tokens[node] for parent in tree.children(ROOT) for node in tree.children(parent)} == {1}
    assert asked("bigrams", text, Budget(depth=1, width=1, nodes=4)).tokens == (2,)
    assert asked("bigrams", text, Budget(depth=1, width=2, nodes=4, prices=(0.3,))).tokens == (2,)  # 2/4 pays, 1/4 not
    assert len(asked("bigrams", [1, 2, 3], Budget(depth=2, width=2, nodes=4))) == 0


def test_follower_guesses_what_followed_the_last_time() -> None:
    drafter: Drafter = DRAFTERS["follower"](Workshop(None, None))  # type: ignore[arg-type]
    engine = toy.make_engine("follower", depth=5)
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
