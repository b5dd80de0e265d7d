"""The figures of `bench`, each recomputed by hand on a small example; turns are fair, and what failed is no figure."""

from __future__ import annotations

import math

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError
from outrider.measure.bench import PLAIN, Figures, bench, blocks_of
from outrider.measure.contenders import Parts, Run, fixed, ours
from outrider.measure.intervals import LEAST, median, percentiles
from outrider.measure.prompts import Prompt
from outrider.measure.theory import Seen, acceptance, expected_tokens, predict, rows_free, rows_priced
from outrider.record import Record, RequestCycle, Tally
from tests.models.tiny import make_module, make_tokenizer

PROMPTS = [Prompt(name, name) for name in ("one", "two", "three")]


def tally(*delivered: int) -> Tally:
    made = Tally()
    for count in delivered:
        made.count(drafted=4, delivered=count)
    return made


def figures(*runs: Run, blocks: int) -> Figures:
    return Figures(list(runs), [(i % blocks, f"p{i % blocks}") for i in range(len(runs))])


def test_percentiles_are_those_of_the_values():
    assert percentiles([]) == {}
    assert percentiles([float(value) for value in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def test_bounds_are_those_of_resampled_medians():
    """A resampled median of 9 is at most the k-th value where 5 draws or more are: a binomial tail, no drawing."""
    values = [1.0, 1.1, 1.15, 1.2, 1.3, 1.45, 1.5, 1.8, 2.5]

    def at_most(k: int) -> float:
        return sum(math.comb(9, j) * (k / 9) ** j * (1 - k / 9) ** (9 - j) for j in range(5, 10))

    low = next(values[k - 1] for k in range(1, 10) if at_most(k) >= 0.025)
    high = next(values[k - 1] for k in range(1, 10) if at_most(k) >= 0.975)
    found = median(values)
    assert (found.ratio, found.low, found.high) == (1.3, low, high)
    assert median(values) == found
    assert median([]) is None
    assert median(values[: LEAST - 1]).low is None


def test_a_ratio_is_taken_prompt_by_prompt_over_all_its_runs():
    """By hand: p0 took 2 + 4 s for 20 tokens where plain took 12; p1 1 + 1 for 10 where plain took 3: 2 and 1.5."""
    mine = figures(Run(10, 2.0), Run(5, 1.0), Run(10, 4.0), Run(5, 1.0), blocks=2)
    plain = figures(Run(10, 6.0), Run(5, 1.5), Run(10, 6.0), Run(5, 1.5), blocks=2)
    assert mine.ratios(plain) == pytest.approx([2.0, 1.5])
    told = mine.to_json(plain)
    assert told["ratio_to_plain"] == pytest.approx(1.75)
    assert told["interval"] == [None, None]
    assert told["least_ratio"] == pytest.approx(1.5)
    assert told["tokens_per_second"] == pytest.approx(30 / 8)


def test_a_failed_run_is_a_failure_and_never_a_number():
    mine = figures(Run(10, 2.0, tally(3)), Run(error="no room"), Run(4, 1.0, tally(1, 2)), blocks=3)
    plain = figures(Run(10, 3.0), Run(8, 2.0), Run(error="no law"), blocks=3)
    told = mine.to_json(plain)
    assert (told["runs"], told["failed"]) == (3, 1)
    assert told["failures"] == [{"prompt": "p1", "error": "no room"}]
    assert mine.ratios(plain) == pytest.approx([1.5])
    assert told["tokens_per_second"] == pytest.approx(14 / 3)
    assert (told["tau"], told["accepted_by_position"]) == (2.0, [2, 1])
    nothing = figures(Run(error="no room"), blocks=1)
    told = nothing.to_json(figures(Run(1, 1.0), blocks=1))
    assert [told[name] for name in ("tokens_per_second", "ratio_to_plain", "interval", "tau", "parts")] == [None] * 5
    assert told["first_token"] == told["between"] == {}


def test_where_time_goes_adds_up():
    """Two decoding passes, one of which brought three tokens; one pass with a prompt; one cycle in flight."""
    parts = Parts()
    parts.count(Record(9, 8, (RequestCycle(0, 0, 0, 1),), 0.1, 0.5, 0.1, 0.9))
    parts.count(Record(3, 0, (RequestCycle(0, 2, 2, 3),), 0.2, 0.5, 0.1, 1.0))
    parts.count(Record(1, 0, (RequestCycle(0, 0, 0, 1),), 0.0, 0.4, 0.1, 0.6))
    parts.count(Record(5, 0, (RequestCycle(0, 4, 4, 2),), 0.0, 0.0, 0.0, 0.7, overlaps=True))
    told = (parts.prompt, parts.draft, parts.verify, parts.sample, parts.other, parts.flying)
    assert told == pytest.approx((0.9, 0.2, 0.9, 0.2, 0.3, 0.7))
    assert (parts.passes, parts.delivered) == (3, 6)
    assert parts.decoding == pytest.approx(2.3)
    run = Run(7, 4.0, parts=parts)
    assert run.decode_rate == pytest.approx(6 / 2.3)
    plain = Parts(verify=3.0, passes=6, delivered=6, prompt=0.8)
    mine, other = figures(run, blocks=1), figures(Run(7, 5.0, parts=plain), blocks=1)
    assert mine.decode_ratio(other).ratio == pytest.approx((6 / 2.3) / (6 / 3.0))


def test_who_begins_changes_and_every_one_answers_every_block():
    asked = []

    def contender(name):
        def run(prompts, max_tokens):
            asked.append((name, [prompt.name for prompt in prompts], max_tokens))
            return Run(error="no") if name == "b" and prompts[0].name == "three" else Run(1, 1.0)

        return run

    found = bench({PLAIN: contender("a"), "b": contender("b")}, PROMPTS, 5, repeats=2, together=2)
    warm, turns = asked[:2], asked[2:]
    assert [size for *_, size in warm] == [8, 8]
    assert [name for name, *_ in turns] == ["a", "b", "b", "a"] * 2
    assert [names for _, names, _ in turns[::2]] == [["one", "two"], ["three", "one"]] * 2
    assert found["b"].failures == [("three, one", "no")] * 2
    assert len(found[PLAIN].answered) == 4
    assert [[p.name for p in block] for block in blocks_of(PROMPTS, 4)] == [["one", "two", "three", "one"]]
    with pytest.raises(ConfigError, match="nothing to measure"):
        bench({"b": contender("b")}, PROMPTS, 5)


def test_an_engine_is_timed_from_prompt_to_last_token(tmp_path):
    make_module("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), drafter="ngram", adaptive=False, depth=3, num_slots=512, self_test=False, threads=1)
    asked = [Prompt("a", (5, 6, 7, 5, 6, 7)), Prompt("b", (9, 8, 9, 8, 9))]
    run = ours(llm, SamplingParams(ignore_eos=True))(asked, 20)
    parts = run.parts
    assert run.tokens == 40
    assert parts.prompt + parts.decoding + parts.outside == pytest.approx(run.seconds)
    assert len(run.first) == len(run.between) == 2
    assert all(0 < value < run.seconds for value in run.first)
    # What a prompt was given after its first token, it was given in pieces that lie between its gaps.
    assert len(run.gaps) == run.tally.cycles
    assert sum(run.gaps) == pytest.approx(sum(19 * value for value in run.between))
    assert parts.delivered <= 38
    assert run.context == (6 + 5 + 20) // 2
    assert sum(map(len, run.misses)) == parts.passes
    assert len(run.misses[True]) > 0
    before = llm.engine.control.prices.to_json()
    other = fixed(llm, ours(llm, SamplingParams(ignore_eos=True)), 2, 1)(asked, 20)
    assert other.tally.drafted <= 2 * other.tally.cycles
    assert llm.engine.control.prices.to_json() == before
    assert "no id of this model" in ours(llm, SamplingParams())([Prompt("c", (10**6,))], 5).error


def test_where_a_drafter_failed_there_is_no_figure(tmp_path):
    """Its texts go on plainly, and plain decoding beside itself would look like a drafter that costs nothing."""
    make_module("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), drafter="ngram", adaptive=False, depth=3, num_slots=512, self_test=False, threads=1)
    contender, asked = ours(llm, SamplingParams(ignore_eos=True)), [Prompt("a", (5, 6, 7, 5, 6, 7))]
    chain = fixed(llm, contender, 2, 1)

    def broken(asks):
        raise MemoryError("no room\nfor it")

    llm.engine.drafter.propose, llm.engine.strict = broken, False
    assert "no room" in chain(asked, 8).error
    assert "no room" in contender(asked, 8).error
    assert len(llm.generate([(5, 6, 7)], SamplingParams(max_tokens=8, ignore_eos=True), raw=True)[0].token_ids) == 8
    for run in (contender(asked, 8), chain(asked, 8)):
        assert run.error
        assert run.tokens == 0


def test_expected_tokens_are_the_sum_of_a_series():
    """Leviathan et al.: one token surely, and one more for each guess that all before it let through."""
    for alpha in (0.0, 0.5, 0.8, 1.0):
        for depth in (0, 1, 5):
            assert expected_tokens(alpha, depth) == pytest.approx(sum(alpha**i for i in range(depth + 1)))
    best = max(range(1, 20), key=lambda depth: rows_free(0.8, depth, 0.1))
    assert (best, round(rows_free(0.8, best, 0.1), 2)) == (6, 2.47)  # as tables of that law have it
    assert rows_priced(0.5, 2, 0.1, lambda rows: rows / 2) == pytest.approx(1.75 / (0.2 + 1.5))


def test_one_acceptance_is_guesses_kept_over_guesses_reached():
    """Chains of 2: five cycles kept 0, 1, 2, 2, 0 of theirs, and so reached 1, 2, 2, 2, 1 guesses."""
    assert acceptance({2: tally(1, 2, 3, 3, 1)}) == pytest.approx(5 / 8)
    assert acceptance({2: tally(1, 2, 3, 3, 1), 1: tally(2, 1)}) == pytest.approx(6 / 10)
    assert acceptance({}) is None


def test_a_prediction_is_made_of_measured_prices():
    """A plain cycle of 5 s, 4 of them the pass; chains of 2 spend 1.1 s more on drafting: a guess costs 0.11."""
    kept = tally(1, 2, 3, 3, 1)
    kept.drafted = 8  # of ten that were asked for: the pass of chains of 3 has 3.4 rows
    chain = Seen(2, kept, draft=1.3, plain_draft=0.2, plain=5.0, plain_pass=4.0)
    found = predict([chain], {1: 2.0, 2: 2.5, 4: 3.0}, deepest=3)
    assert (found["alpha"], found["draft"], found["filled"]) == pytest.approx((0.625, 0.11, 0.8))
    three = found["points"][3]
    tokens = 1 + 0.625 + 0.625**2 + 0.625**3
    assert three["free"] == pytest.approx(tokens / 1.33)
    rows = 2.5 + 0.5 * (3.4 - 2) / 2  # on the line from 2 rows' price to 4 rows'
    assert three["priced"] == pytest.approx(tokens / (0.33 + (1 + 4 * rows / 2.0) / 5))
    assert found["points"][0] == {"depth": 0, "free": 1.0, "priced": 1.0}
    assert predict([], {1: 1.0}, 3) is None
