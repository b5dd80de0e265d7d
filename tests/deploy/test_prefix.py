"""Which server a request goes to: by what it has read and by its load."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.deploy.prefix import BLOCK, MOST_BLOCKS, SLACK, Places, digests

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def of(path: str = PLAIN, **body) -> tuple[int, ...]:
    return digests(path, json.dumps(body).encode())


def turns(*said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in said]


def test_a_longer_text_goes_on_from_a_shorter_one():
    text = "".join(chr(97 + i % 23) for i in range(5 * BLOCK))
    whole = of(prompt=text)
    assert len(whole) == len(set(whole)) == 5
    assert of(prompt=text[: 3 * BLOCK + 1]) == whole[:3]
    assert of(prompt="x" + text[1:]) != whole
    assert not set(of(prompt="x" + text[1:])) & set(whole)  # a block counts with all that comes before it
    assert of(prompt=[text, "other"]) == whole
    assert len(of(prompt="z" * BLOCK * (MOST_BLOCKS + 9))) == MOST_BLOCKS


def test_a_conversation_goes_on_from_its_turns():
    first = of(CHAT, messages=turns("a" * 600, "b" * 600))
    then = of(CHAT, messages=turns("a" * 600, "b" * 600, "c" * 600))
    assert len(first) >= 4
    assert then[: len(first)] == first
    assert of(CHAT, messages=turns("a" * 600), tools=[{"type": "function"}])[:1] != first[:1]


def test_token_ids_are_a_text_too():
    ids = list(range(1000, 1400))
    assert of(prompt=[ids])[:4] == of(prompt=[*ids, 7])[:4] == of(prompt=ids)[:4]
    assert len(of(prompt=ids)) > 4


@pytest.mark.parametrize(
    "body",
    [b"", b"[", b"[]", b"null", b'{"prompt": {"a": 1}}', b'{"prompt": []}', b"[" * 99999, b'{"messages": 5}', b"\xff"],
)
def test_a_body_that_says_no_text_has_no_beginning(body: bytes):
    assert digests(CHAT, body) == digests(PLAIN, body) == ()


def test_who_has_read_most_of_it_gets_it():
    places, text = Places(), of(prompt="".join(map(str, range(2000))))
    for server, blocks in (("a", 1), ("b", 6), ("c", 3)):
        places.read(text[:blocks], server)
    assert places.rank(text, ["a", "b", "c", "d"])[:3] == ["b", "c", "a"]
    assert places.rank(text, ["a", "c"])[0] == "c"  # one that went is not asked
    assert places.rank(text, ["a", "b", "c"], avoid=["b"]) == ["c", "a", "b"]


def test_what_one_has_read_does_not_make_it_busier_than_others_by_much():
    places, text = Places(), of(prompt="y" * 3 * BLOCK)
    sent = []
    for _ in range(40):
        server = places.rank(text, ["a", "b", "c", "d"])[0]
        places.began(server)
        places.read(text, server)
        sent.append(server)
        loads = [places.load(name) for name in "abcd"]
        assert max(loads) <= SLACK * (sum(loads) / 4) + 1
    assert set(sent) == set("abcd")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_loads_are_counted(events):
    places, open_now = Places(), dict.fromkeys("abc", 0)
    for server, begins in events:
        if begins:
            places.began(server)
            open_now[server] += 1
        elif open_now[server]:
            places.ended(server)
            open_now[server] -= 1
    assert {server: places.load(server) for server in "abc"} == open_now
    least = min(open_now.values())
    assert open_now[places.rank((), list("abc"))[0]] == least


def test_texts_that_nobody_knows_are_spread():
    places = Places()
    sent = []
    for i in range(6):
        sent.append(places.rank(of(prompt=f"{i}" * i * BLOCK), ["a", "b", "c"])[0])
        places.began(sent[-1])
        places.ended(sent[-1])
    assert sorted(sent[:3]) == sorted(sent[3:]) == ["a", "b", "c"]
    assert places.rank((), ["c", "d"])[0] == "d"  # one that is new
