"""Lookahead: its pool and window, and the door for rows that the target only looks at."""

from __future__ import annotations

import pytest
import torch

from outrider.control.cost import PassCost
from outrider.control.depth import Control
from outrider.drafters.lookahead import NGRAM, PER_TOKEN, TOKENS, WINDOW, Lookahead, Pool, _Jacobi
from outrider.request import Request, SamplingParams
from outrider.tree import NO_GUESS
from tests import toy


def watched(**settings):
    """An engine whose drafter's passes are noted: (batch, output, commits, probe trees by request id)."""
    engine = toy.make_engine("lookahead", **settings)
    drafter, seen, asked = engine.drafter, [], {}
    observe, probe = drafter.observe, drafter.probe

    def noting_probe(asks):
        trees = probe(asks)
        asked.update({ask.request.id: (ask, tree) for ask, tree in zip(asks, trees, strict=True)})
        return trees

    def noting(batch, output, commits):
        seen.append((batch, output, commits, dict(asked)))
        asked.clear()
        return observe(batch, output, commits)

    drafter.observe, drafter.probe = noting, noting_probe
    return engine, seen


def requests(count: int = 3, **params):
    chosen = {"max_tokens": 30, **params}
    return [toy.make_request(i, [i + 1, 5, i + 2], SamplingParams(seed=i, **chosen)) for i in range(count)]


def test_probes_see_their_own_path_and_nothing_else() -> None:
    """Each probe's logits are the law after the known text and its path: no guess and no neighbour leaks in."""
    engine, seen = watched(depth=3, width=2)
    for request in requests():
        engine.add(request)
    checked = 0
    while not engine.scheduler.is_idle:
        engine.step()
        _, output, commits, asked = seen.pop()
        for commit in commits:
            if not len(commit.probes):
                continue
            ask, tree = asked[commit.request.id]
            known = commit.request.tokens(0, commit.request.num_tokens - commit.num_new)
            assert len(commit.probes) == len(tree) <= ask.budget.nodes
            assert max(tree.depths()) <= ask.budget.depth
            for node, row in enumerate(commit.probes):
                path = [tree.tokens[i] for i in tree.path(node)]
                assert torch.equal(output.logits[row], toy.law([*known, *path]))
                checked += 1
    assert checked > 300


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_probes_change_no_text_and_no_key(temperature: float) -> None:
    stacks, texts = [], []
    for drafter in ("none", "lookahead"):
        engine = toy.make_engine(drafter, depth=3)
        asked = requests(temperature=temperature)
        for request in asked:
            engine.add(request)
        keys: dict[int, list[torch.Tensor]] = {}
        while not engine.scheduler.is_idle:
            engine.step()
            engine.ledger.check()
            for request in engine.scheduler.running:
                span = engine.ledger[request.id, "target"]
                slots = engine.ledger.slots((request.id, "target"), 0, span.committed)
                keys[request.id] = [tensor[slots].clone() for tensor in (*engine.pages.keys, *engine.pages.values)]
        stacks.append(keys)
        texts.append([request.output for request in asked])
    assert texts[0] == texts[1]
    for number, plain in stacks[0].items():
        for a, b in zip(plain, stacks[1][number], strict=True):
            shortest = min(len(a), len(b))
            assert torch.equal(a[:shortest], b[:shortest])


def test_what_the_target_says_of_them_reaches_the_pool() -> None:
    """A full column is an n-gram whose last token is the target's likeliest after the others."""
    engine, _ = watched(depth=2)
    (request,) = requests(count=1, max_tokens=25)
    engine.add(request)
    for _ in range(15):
        engine.step()
    window = engine.drafter._windows[request.id]
    text = request.tokens(0, request.num_tokens)
    said = {tuple(text[i : i + NGRAM]) for i in range(len(text))}
    found = {(first, *rest) for first, entries in window.pool._found.items() for rest in entries}
    assert len(found - said) > 5
    assert all(len(column) == NGRAM - 1 for column in window.columns)


@pytest.mark.parametrize("max_rows", [3, 4, 7, 12, 64])
def test_probes_are_the_first_to_go_where_rows_are_short(max_rows: int) -> None:
    """Known tokens, prompts and guesses have their rows before any probe has one."""
    engine, seen = watched(depth=2, max_rows=max_rows)
    plan = engine.scheduler.plan
    probes = 0

    def noting(budgets):
        nonlocal probes
        made = plan(budgets)
        used = sum(work.num_rows + work.budget.nodes + len(work.probe_slots) for work in made.works)
        assert used <= max_rows
        if any(work.probe_slots for work in made.works):
            probes += 1
            assert len(made.works) == len(engine.scheduler.running)
            for work in made.works:
                assert work.budget.nodes == budgets.get(work.request.id, NO_GUESS).nodes or not work.budget.depth
                assert work.draws
        return made

    engine.scheduler.plan = noting
    asked = requests()
    assert toy.run(engine, asked) == toy.run(toy.make_engine(max_rows=max_rows), requests())
    assert all(batch.num_rows <= max_rows for batch, *_ in seen)
    assert (probes > 0) == (max_rows > 3)


def test_probes_cost_nobody_a_slot() -> None:
    """With memory for one request and a little more, nobody is preempted who would not be without them."""
    for blocks in range(8, 30, 3):
        counts = []
        for drafter in ("lookahead", "none"):
            engine = toy.make_engine(drafter, depth=1, blocks=blocks, block_size=4)
            lost = []
            plan = engine.scheduler.plan

            def noting(budgets, plan=plan, lost=lost):
                made = plan(budgets)
                lost.extend(made.preempted)
                return made

            engine.scheduler.plan = noting
            toy.run(engine, requests(count=2, max_tokens=10))
            counts.append(len(lost))
        assert counts[0] <= counts[1]


def test_a_request_that_wants_no_speculation_is_not_probed() -> None:
    engine, seen = watched(depth=2)
    for params in ({"speculation": False}, {"depth": 0}):
        toy.run(engine, requests(**params))
    assert not any(len(commit.probes) for _, _, commits, _ in seen for commit in commits)


def test_adaptively_only_rows_that_cost_nothing_are_probed() -> None:
    asked = [Request(i, (1,), SamplingParams(), 0, limit=99) for i in range(2)]
    free = {1: 10e-3, 16: 10e-3, 32: 30e-3}
    dear = {1: 10e-3, 16: 25e-3}
    for table, extra, expected in ((free, 4, 4), (free, 15, 7), (dear, 15, 0)):
        control = Control(PassCost(table), depth=4, width=1, extra_rows=extra)
        budgets = control.budget(asked, {0: 0, 1: 0})
        assert [budgets[i].probes if i in budgets else 0 for i in range(2)] == [expected] * 2
        assert all(budget.depth == budget.nodes == 0 for budget in budgets.values())
    fixed = Control(PassCost(dear), depth=4, width=1, adaptive=False, extra_rows=15)
    assert fixed.budget(asked)[0].probes == 15


def test_the_pool_prefers_long_matches_then_the_latest() -> None:
    pool = Pool()
    for ngram in ([1, 2, 3, 4], [7, 1, 9, 0], [1, 2, 5, 6]):
        pool.add(ngram)
    assert list(pool.after((7, 1)).items()) == [(9, 2), (2, 1)]
    assert list(pool.after((1, 2)).items()) == [(5, 2), (3, 2)]
    assert pool.after((8,)) == {}
    pool.add([1, 2, 3, 4])
    assert next(iter(pool.after((1, 2)))) == 3


def test_the_pool_is_bounded() -> None:
    pool = Pool()
    for number in range(3 * PER_TOKEN):
        pool.add([0, number, number, number])
    assert list(pool.after((0,))) == list(range(3 * PER_TOKEN))[: -PER_TOKEN - 1 : -1]
    for number in range(TOKENS + 10):
        pool.add([number, 1, 2, 3])
    assert len(pool._found) == TOKENS


def test_a_window_grows_columns_into_ngrams() -> None:
    window = _Jacobi(columns=[[1], [2]])
    for iterate in range(3, 3 + 2 * NGRAM, 2):
        tree = window.tree(99, 99)
        assert len(tree) == sum(map(len, window.columns))
        window.grow([iterate, iterate + 1])
    assert window.pool.after((1,)) == {3: 1}
    assert window.pool.after((1, 3)) == {5: 2}
    assert [len(column) for column in window.columns] == [NGRAM - 1] * 2
    assert len(window.tree(NGRAM, 99)) == NGRAM - 1
    assert len(window.tree(99, NGRAM - 2)) == 0


def test_columns_that_agree_share_their_rows() -> None:
    window = _Jacobi(columns=[[1, 2, 3], [2, 3, 9]])
    tree = window.tree(99, 99)
    assert tree.tokens == (1, 2, 3, 9)
    assert tree.parents == (-1, 0, 1, 2)
    assert window.newest == [2, 3]


def test_without_rows_to_spare_it_looks_up_the_text() -> None:
    engine = toy.make_engine("lookahead", depth=4)
    engine.control.extra_rows = 0
    asked = requests(max_tokens=100)
    toy.run(engine, asked)
    assert sum(request.tally.accepted for request in asked) > 10
    assert Lookahead(None).needs.extra_rows == WINDOW * (NGRAM - 1)  # type: ignore[arg-type]
