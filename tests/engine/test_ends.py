"""The boundary rule: ids, text, logprobs and reason end together, however tokens come in cycles (faults 18 to 22)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.ends import deliver
from outrider.engine.text import TextStream
from outrider.request import FinishReason, Request, SamplingParams, TokenLogprob


def request(limit: int = 100, ends: tuple[int, ...] = ()) -> Request:
    return Request(0, (1,), SamplingParams(), 0, end_ids=frozenset(ends), limit=limit)


def bytes_decoder(ids: list[int]) -> str:
    """Every id is a byte: characters of several bytes span several tokens."""
    return bytes(ids).decode(errors="replace")


def test_an_end_token_inside_a_burst_ends_before_the_limit() -> None:
    asked = request(limit=5, ends=(12,))
    emission = deliver(asked, [10, 11, 12, 20, 21, 22], None, None)
    assert emission.tokens == (10, 11, 12)
    assert asked.finish_reason is FinishReason.STOP


def test_an_end_token_is_in_the_ids_and_not_in_the_text() -> None:
    asked, stream = request(ends=(ord("."),)), TextStream(bytes_decoder)
    assert deliver(asked, list(b"one. two"), None, stream).text == stream.text == "one"
    assert bytes(asked.output) == b"one."


def test_the_limit_cuts_a_burst() -> None:
    asked = request(limit=5)
    assert deliver(asked, [10, 11, 12, 20, 21, 22], None, None).tokens == (10, 11, 12, 20, 21)
    assert asked.finish_reason is FinishReason.LENGTH


def test_an_end_token_that_is_also_the_last_allowed_one_is_a_stop() -> None:
    asked = request(limit=1, ends=(10,))
    deliver(asked, [10], None, None)
    assert asked.finish_reason is FinishReason.STOP


def test_text_ids_and_logprobs_end_at_the_earliest_stop_string() -> None:
    asked = request()
    rows = [TokenLogprob(token, -1.0) for token in b"hello END world STOP"]
    stream = TextStream(bytes_decoder, ("STOP", "END"))
    emission = deliver(asked, list(b"hello END world STOP"), rows, stream)
    assert bytes(asked.output) == b"hello END"
    assert stream.text == emission.text == "hello "
    assert len(asked.logprobs) == len(asked.output) == len(emission.tokens)
    assert asked.finish_reason is FinishReason.STOP


def test_a_stop_string_spans_two_cycles_and_its_beginning_is_held_back() -> None:
    asked, stream = request(), TextStream(bytes_decoder, ("STOP",))
    first = deliver(asked, list(b"a ST"), None, stream)
    second = deliver(asked, list(b"OP b"), None, stream)
    assert (first.text, second.text) == ("a ", "")
    assert bytes(asked.output) == b"a STOP"


def test_a_beginning_of_a_stop_string_that_comes_to_nothing_is_shown() -> None:
    asked, stream = request(limit=6), TextStream(bytes_decoder, ("STOP",))
    texts = [deliver(asked, list(part), None, stream).text for part in (b"a ST", b"ay")]
    assert "".join(texts) == "a STay"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    stream = TextStream(bytes_decoder, ("a",), min_tokens=3)
    assert [stream.push(token) for token in b"aaa"] == [False, False, True]
    assert stream.text == "aa"


@given(
    text=st.text(alphabet="abXé漢🙂 ", max_size=30),
    stops=st.lists(st.text(alphabet="abXé漢🙂", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    limit=st.integers(1, 60),
)
def test_chunks_of_any_size_give_the_same_stream(text: str, stops: list[str], cuts: list[int], limit: int) -> None:
    """One stream re-chunked at will: equal ids, equal reason, equal concatenated deltas, no half characters inside."""
    tokens = list(text.encode())
    outcomes = []
    for sizes in ([1], [len(tokens) or 1], cuts):
        asked, stream = request(limit=limit), TextStream(bytes_decoder, stops)
        deltas, start, turn = [], 0, 0
        while start < len(tokens) and asked.finish_reason is None:
            size = sizes[turn % len(sizes)]
            deltas.append(deliver(asked, tokens[start : start + size], None, stream).text)
            start, turn = start + size, turn + 1
        if asked.finish_reason is None:
            stream.finish()
            deltas.append(stream.take(final=True))
        assert "".join(deltas) == stream.text
        outcomes.append((tuple(asked.output), stream.text, asked.finish_reason))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    said = bytes(outcomes[0][0]).decode(errors="replace")
    found = [said.index(stop) for stop in stops if stop in said]
    if outcomes[0][2] is FinishReason.STOP:
        assert outcomes[0][1] == said[: min(found)]


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    stream = TextStream(bytes_decoder)
    stream.push(ord("a"))
    stream.push(0xE6)
    assert stream.take() == "a"
    stream.finish()
    assert stream.take(final=True) == "\ufffd"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_num_accepted_counts_all_but_the_last(count: int) -> None:
    assert deliver(request(), [1] * count, None, None).num_accepted == count - 1
