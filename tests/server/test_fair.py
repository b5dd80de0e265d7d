"""Fair shares over HTTP: a client that floods waits for itself; the lobby, turns at the tokenizer, priorities."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.errors import ApiError
from outrider.server.gate import _address
from outrider.server.lobby import Lobby
from outrider.server.turns import Turns
from tests.server.conftest import Live, live, open_tiny
from tests.server.test_refusals import refusal

LONG = {"prompt": "ab", "max_tokens": 120, "ignore_eos": True, "temperature": 1.0}


@dataclass(eq=False)
class Fake:
    """What the lobby reads of a job."""

    client: str
    num_samples: int = 1
    priority: int = 0
    first_token: float | None = None


def test_a_full_lobby_keeps_a_place_for_whoever_holds_less() -> None:
    lobby, flood = Lobby(4), [Fake("a") for _ in range(4)]
    assert [lobby.enter(job) for job in flood] == [[]] * 4
    assert lobby.enter(Fake("a")) is None
    flood[3].first_token = 1.0  # it has brought something, and is kept
    assert lobby.enter(Fake("b")) == [flood[2]]
    assert lobby.enter(Fake("b")) == [flood[1]]
    assert lobby.enter(Fake("b")) is None, "it would hold most itself then"
    assert lobby.enter(Fake("c", num_samples=2)) is None
    assert lobby.enter(Fake("c")) is not None
    assert lobby.num_open == 4
    with pytest.raises(ApiError, match="5 samples are more"):
        lobby.enter(Fake("d", num_samples=5))


def test_whoever_yields_goes_first() -> None:
    lobby, later, own = Lobby(2), Fake("a", priority=1), Fake("b", priority=1)
    assert (lobby.enter(later), lobby.enter(own)) == ([], [])
    assert lobby.enter(Fake("b")) == [own]
    assert lobby.enter(Fake("b")) == [later]
    assert lobby.enter(Fake("c", priority=1)) is None


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 1), st.integers(0, 9)), max_size=60)
)
def test_the_lobbys_books(asked: list[tuple[str, int, int, int]]) -> None:
    lobby, inside = Lobby(6), []
    for client, samples, priority, act in asked:
        job = Fake(client, samples, priority)
        gone = lobby.enter(job)
        if gone is not None:
            inside = [one for one in inside if one not in gone] + [job]
        if act > 6 and inside:
            inside[act % len(inside)].first_token = 1.0
        elif act < 2 and inside:
            lobby.leave(inside.pop(act % len(inside)))
        assert lobby.num_open == sum(one.num_samples for one in inside) <= lobby.most
        assert all(held > 0 for held in lobby._held.values())


def test_turns_go_from_client_to_client_and_none_is_lost() -> None:
    async def all_of_them() -> list[str]:
        turns, done = Turns(), []

        async def work(client: str, number: int) -> None:
            async with turns.turn(client):
                await asyncio.sleep(0)
                done.append(f"{client}{number}")

        tasks = [asyncio.create_task(work(*each)) for each in [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0)]]
        await asyncio.sleep(0)
        assert (turns.num_waiting("a"), turns.num_waiting("b")) == (3, 1)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(1), turns.turn("c"):
            return done

    assert asyncio.run(all_of_them()) == ["a0", "a1", "b0", "a3"]


def test_one_that_leaves_as_it_is_let_in_passes_its_turn_on() -> None:
    async def both() -> None:
        turns = Turns()
        async with turns.turn("a"):
            waiting = asyncio.create_task(turns.turn("b").__aenter__())
            await asyncio.sleep(0)
        waiting.cancel()  # its future is done, and it has not run since
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(1), turns.turn("c"):
            pass

    asyncio.run(both())


def test_a_client_is_an_address_or_a_network() -> None:
    assert _address({"client": ("10.0.0.7", 4)}) == "10.0.0.7"
    assert _address({"client": ("2001:db8::7", 4)}) == _address({"client": ("2001:db8::8", 4)}) == "2001:db8::/64"
    assert _address({"client": None}) == ""
    assert _address({"client": ("socket", 0)}) == "socket"


@pytest.fixture(scope="module")
def small(folder):
    return open_tiny(folder, num_slots=1400, max_context=512, block_size=4, max_requests=2)


def ask(served: Live, name: str, **more) -> httpx.Response:
    """Whoever comes through a proxy of this machine is told apart by what that says of it."""
    with served.http(headers={"X-Forwarded-For": name}) as http:
        return http.post("/v1/completions", json={**LONG, **more})


def flood(served: Live, pool: ThreadPoolExecutor, count: int, **more) -> list:
    sent = [pool.submit(ask, served, "10.0.0.1", **more) for _ in range(count)]
    deadline = time.monotonic() + 20
    while served.server.bridge.num_open + sum(one.done() for one in sent) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return sent


def test_a_flood_waits_for_itself(small) -> None:
    """It holds all seats and the whole queue, and another client is answered as if it held its share."""
    with live(small, max_queue=6) as served, ThreadPoolExecutor(20) as pool:
        sent = flood(served, pool, 14)
        for _ in range(2):
            answer = ask(served, "10.0.0.2", max_tokens=5)
            assert answer.status_code == 200
        num_over = sum(one.done() for one in sent)
        assert num_over < 14, "the test wants the flood to last"
        answers = [one.result() for one in sent]
        statuses = [one.status_code for one in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 6
        for one in answers:
            if one.status_code == 429:
                assert refusal(one, 429)["code"] == "queue_full"
                assert int(one.headers["retry-after"]) >= 1
        with served.http() as http:
            assert 'outrider_requests_refused_total{reason="over_share"}' in http.get("/metrics").text
        served.settle()


def test_a_flood_does_not_change_a_text(small) -> None:
    with live(small, max_queue=64) as served, ThreadPoolExecutor(20) as pool:
        alone = ask(served, "10.0.0.2", seed=3, max_tokens=20).json()["choices"][0]["text"]
        expected = ask(served, "10.0.0.2", seed=4).json()["choices"][0]["text"]
        sent = flood(served, pool, 8, seed=4)
        assert ask(served, "10.0.0.2", seed=3, max_tokens=20).json()["choices"][0]["text"] == alone
        assert small.engine.scheduler.num_preemptions > 0, "somebody has given way"
        assert {one.result().json()["choices"][0]["text"] for one in sent} == {expected}
        served.settle()


def test_what_yields_waits_for_the_others(small) -> None:
    with live(small, max_queue=64) as served, ThreadPoolExecutor(20) as pool:
        later = flood(served, pool, 4, priority=1)
        first = [pool.submit(ask, served, "10.0.0.1", max_tokens=30) for _ in range(4)]
        for one in first:
            assert one.result().status_code == 200
        assert sum(one.done() for one in later) < 4
        assert all(one.result().status_code == 200 for one in later)
        error = refusal(ask(served, "10.0.0.1", priority=-1))
        assert error["param"] == "priority"
        served.settle()


def test_keys_tell_clients_apart_and_are_not_told(small, tmp_path, caplog) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    caplog.set_level("INFO", "outrider.access")
    with live(small, api_key_file=str(keys)) as served, served.http() as http:
        body = {**LONG, "max_tokens": 2}
        http.post("/v1/completions", json=body, headers={"Authorization": "Bearer second-key"})
        served.settle()
    (facts,) = [record.facts for record in caplog.records if record.facts["path"] == "/v1/completions"]
    assert facts["client"] == "key 2"
    assert "second-key" not in caplog.text
