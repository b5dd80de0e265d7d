"""What a drafter does wrong harms no text: it is told once, in a sentence for its author."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.cache.pages import PageSpec
from outrider.drafters.base import Ask, Drafter, Needs, Workshop
from outrider.drafters.cascade import Cascade, build
from outrider.engine.step import Engine
from outrider.errors import DrafterError
from outrider.registry import DRAFTERS
from outrider.request import SamplingParams
from outrider.tree import DraftTree
from tests import toy
from tests.models.tiny import make_module, make_tokenizer

Answer = Callable[[Sequence[Ask]], Any]
SILENT = DraftTree()
WITHOUT = "texts go on without its guesses"


class Bad(Drafter):
    """Answers whatever it is told to."""

    name = "bad"

    def __init__(self, answer: Answer = lambda asks: [SILENT] * len(asks)) -> None:
        self.answer = answer

    def propose(self, asks: Sequence[Ask]) -> Any:
        return self.answer(asks)


def each(tokens: Sequence[Any], parents: Sequence[Any], laws: Any = None) -> Answer:
    return lambda asks: [DraftTree(tuple(tokens), tuple(parents), laws)] * len(asks)


FAULTS = {
    "drafter 'bad' returned 1 tree for 2 asks": lambda asks: [SILENT],
    "drafter 'bad' returned None for 2 asks: return a list": lambda asks: None,
    "drafter 'bad' returned None for an ask; DraftTree() says nothing": lambda asks: [None, SILENT],
    "drafter 'bad' returned a list for an ask; DraftTree() says nothing": lambda asks: [[1], [2]],
    "drafter 'bad': token 99 at node 0 is outside the vocabulary of 23": each([99], [-1]),
    "drafter 'bad': token -1 at node 1 is outside the vocabulary of 23": each([1, -1], [-1, 0]),
    "drafter 'bad': token 1.0 or parent -1 of node 0 is no int": each([1.0], [-1]),
    "drafter 'bad': node 0 names parent 1, which does not come before it": each([1, 2], [1, -1]),
    "drafter 'bad': node 1 names parent -2, which does not come before it": each([1, 2], [-1, -2]),
    "drafter 'bad': nodes 0 and 1 are siblings with the same token": each([1, 1], [-1, -1]),
    "drafter 'bad': 2 tokens but 1 parent": each([1, 2], [-1]),
    "drafter 'bad': laws of shape (1, 23) for 2 nodes and a vocabulary of 23": each(
        [1, 2], [-1, 0], toy.law([1])[None]
    ),
    "drafter 'bad' proposed 20 nodes where its budget allows 6": each(range(20), [-1] * 20),
    "drafter 'bad' proposed 4 levels where its budget allows 3": each([1, 2, 3, 4], [-1, 0, 1, 2]),
    "drafter 'bad' failed (ZeroDivisionError: ": lambda asks: 1 // 0,
}


def engine_with(drafter: Drafter, strict: bool, **settings: Any) -> Engine:
    engine = toy.make_engine("ngram", depth=3, width=2, **settings)
    engine.drafter, engine.strict = drafter, strict
    return engine


def requests(count: int = 2) -> list[toy.Request]:
    return [toy.make_request(i, [1, i + 2, 3], SamplingParams(max_tokens=12, temperature=1.0)) for i in range(count)]


@pytest.mark.parametrize(("sentence", "answer"), FAULTS.items())
def test_texts_go_on_and_the_fault_is_told_once(
    sentence: str, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    plain = toy.run(toy.make_engine(), requests())
    engine = engine_with(Bad(answer), strict=False)
    with caplog.at_level(logging.WARNING):
        assert toy.run(engine, requests()) == plain
    (told,) = caplog.messages
    assert told == str(engine.fault)
    assert told.startswith(sentence)
    assert told.endswith("; " + WITHOUT)
    with pytest.raises(DrafterError, match="texts go on"), engine.always_guessing(3):
        pass


@pytest.mark.parametrize(("sentence", "answer"), FAULTS.items())
def test_where_faults_are_looked_for_they_are_raised(sentence: str, answer: Answer) -> None:
    engine = engine_with(Bad(answer), strict=True)
    raised = ZeroDivisionError if "ZeroDivision" in sentence else DrafterError
    with pytest.raises(raised) as found:
        toy.run(engine, requests())
    assert raised is ZeroDivisionError or str(found.value) == sentence
    assert engine.drafter is not None


@pytest.mark.parametrize("verb", ["begin", "grade", "observe", "seen", "end", "probe"])
@pytest.mark.parametrize("after", [0, 1])
def test_any_verb_may_fail_at_any_time(verb: str, after: int) -> None:
    """The slots that were held for its guesses come back, and nothing is asked of it again."""
    plain = toy.run(toy.make_engine(), requests(3))
    engine = toy.make_engine("lookahead+small_model", depth=3, width=2)
    engine.strict = False
    calls, drafter = [0], engine.drafter
    assert drafter is not None
    works = getattr(drafter, verb)

    def fail(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise KeyError(verb)
        return works(*args)

    setattr(drafter, verb, fail)
    assert toy.run(engine, requests(3)) == plain
    assert engine.fault is not None
    assert f"KeyError: '{verb}'" in str(engine.fault)
    assert calls[0] == after + 1
    assert engine.drafter is None


@pytest.mark.parametrize("grade", [-1, 2.0, "sure"])
def test_a_grade_is_a_whole_number(grade: Any) -> None:
    engine = engine_with(Bad(), strict=False)
    engine.drafter.grade = lambda request: grade  # type: ignore[union-attr, method-assign]
    assert toy.run(engine, requests()) == toy.run(toy.make_engine(), requests())
    assert str(engine.fault).startswith(f"drafter 'bad' graded its guess {grade!r}: give an int from 0 on, or None")


def test_a_lie_about_its_stack_is_its_own_fault() -> None:
    engine = toy.make_engine("small_model", depth=3)
    engine.strict = False
    engine.drafter.seen = lambda request: 1000  # type: ignore[union-attr, method-assign]
    assert toy.run(engine, requests()) == toy.run(toy.make_engine(), requests())
    assert "AssertionError" in str(engine.fault)


def test_the_front_door_notes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_module("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setitem(DRAFTERS._entries, "bad", f"{__name__}:Sudden")
    settings = {"kernels": "plain", "num_slots": 1000, "threads": 1}
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=0)
    (plain,) = LLM(str(tmp_path), drafter="none", **settings).generate([[3, 5, 7]], params)
    llm = LLM(str(tmp_path), drafter="bad", adaptive=False, depth=2, **settings)
    before = llm.resolved.notes
    llm.engine.strict = False
    for _ in range(2):
        (result,) = llm.generate([[3, 5, 7]], params)
        assert result.token_ids == plain.token_ids
        assert result.error is None
        assert llm.describe()["notes"] == (*before, "drafter 'bad' returned 0 trees for 1 ask; " + WITHOUT)


def test_a_cascade_names_the_one_that_did_wrong() -> None:
    silent = Bad()
    silent.name = "silent"
    engine = engine_with(Cascade(silent, Bad(lambda asks: [])), strict=True)
    with pytest.raises(DrafterError, match=r"^drafter 'bad' returned 0 trees for 2 asks$"):
        toy.run(engine, requests())


class Sudden(Bad):
    def __init__(self, workshop: Workshop) -> None:
        super().__init__(lambda asks: [])


class Unnamed(Drafter):
    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [SILENT] * len(asks)


class Mute(Drafter):
    name = "mute"


class Prober(Mute):
    needs = Needs(stack=(PageSpec(1, 1, 1),), extra_rows=3)
    propose = Unnamed.propose


class Finished(Unnamed):
    """Writes no `__init__`: the default is built from a workshop."""

    name = "finished"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Unnamed, "Unnamed has no name"),
        (Mute, r"Mute must write propose\(asks\)"),
        (Prober, r"Prober must write probe\(asks\), as it needs extra_rows"),
    ],
)
@pytest.mark.parametrize("joined", ["bad", "ngram+bad", "bad+ngram"])
def test_an_unfinished_drafter_is_refused_when_it_is_built(
    kind: type[Drafter], sentence: str, joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DRAFTERS._entries, "bad", f"{__name__}:{kind.__name__}")
    workshop = Workshop(toy.ToyTarget(), toy.EngineConfig(model="toy", drafter=joined))  # type: ignore[arg-type]
    with pytest.raises(DrafterError, match=sentence):
        build(joined, workshop)


def test_a_drafter_needs_no_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS._entries, "finished", f"{__name__}:Finished")
    engine = toy.make_engine("finished")
    assert toy.run(engine, requests()) == toy.run(toy.make_engine(), requests())
    assert engine.fault is None
