"""A gateway that ends sends its sessions away evenly: no mass reconnect."""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import drain as drain_module
from services.gateway.close import Close
from services.gateway.drain import Renewal, drain, portions

STEP_S = 0.05


@given(st.integers(0, 20_000), st.floats(0.0, 20.0))
def test_portions_add_up_and_are_even(count: int, spread_s: float) -> None:
    some = list(portions(count, spread_s))
    steps = max(1, int(spread_s / STEP_S))
    assert sum(some) == count
    assert len(some) == steps
    assert max(some) <= math.ceil(count / steps)
    assert min(some) >= count // steps


@given(st.integers(1, 500), st.floats(0.05, 20.0))
def test_at_no_time_more_are_gone_than_their_share(count: int, spread_s: float) -> None:
    some = list(portions(count, spread_s))
    for done in range(1, len(some) + 1):
        assert abs(sum(some[:done]) - count * done / len(some)) <= 1


class Session:
    def __init__(self, house: "House") -> None:
        self.house = house
        self.said: list[dict[str, Any]] = []
        self.closed: Close | None = None
        self.at: int | None = None
        house.sessions[self] = None

    @property
    def ended(self) -> bool:
        return self.closed is not None

    def say(self, frame: dict[str, Any]) -> None:
        assert not self.ended
        self.said.append(frame)

    def end(self, close: Close) -> None:
        self.closed, self.at = close, self.house.step
        self.house.sessions.pop(self, None)


class House:
    """Time passes by the drain's own waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sessions: dict[Session, None] = {}
        self.step = 0
        self.meanwhile: dict[int, Any] = {}
        self._sleep = asyncio.sleep
        monkeypatch.setattr(drain_module.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        assert seconds == STEP_S
        self.step += 1
        self.meanwhile.get(self.step, lambda: None)()
        await self._sleep(0)

    def renewal(self, spread_s: float) -> tuple[Renewal, list[Coroutine[None, None, None]]]:
        spawned: list[Coroutine[None, None, None]] = []
        return Renewal(spread_s, spawned.append), spawned

    async def drain(self, spread_s: float) -> None:
        await drain(cast("Any", self.sessions), spread_s)


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    return House(monkeypatch)


@pytest.mark.promise("protocol.3.reconnect")
async def test_each_is_told_to_come_back_and_ended(house: House) -> None:
    sessions = [Session(house) for _ in range(100)]
    await house.drain(1.0)
    assert house.sessions == {}
    assert {len(one.said) for one in sessions} == {1}
    assert {(one.said[0]["t"], one.said[0]["reason"]) for one in sessions} == {("reconnect", "the server drains")}
    assert {one.closed.code for one in sessions if one.closed} == {4503}
    delays = [one.said[0]["after_ms"] for one in sessions]
    assert 0 <= min(delays) < max(delays) <= 1_000


async def test_evenly_over_the_spread_and_in_no_order(house: House) -> None:
    sessions = [Session(house) for _ in range(100)]
    await house.drain(1.0)
    at = [one.at or 0 for one in sessions]
    assert sorted(at) == [step for step in range(20) for _ in range(5)]
    assert at not in (sorted(at), sorted(at, reverse=True))


async def test_those_that_end_by_themselves_are_left_alone(house: House) -> None:
    sessions = [Session(house) for _ in range(40)]

    def end(count: int) -> None:
        for one in list(house.sessions)[:count]:
            one.end(Close(1000, "bye"))

    house.meanwhile = {1: lambda: end(19), 3: lambda: end(40)}
    await house.drain(1.0)
    assert {len(one.said) for one in sessions if one.closed and one.closed.code == 1000} == {0}
    assert house.step == 3, "nobody is left to wait for"


async def test_one_that_was_being_accepted_is_sent_away_at_the_end(house: House) -> None:
    for _ in range(4):
        Session(house)
    late: list[Session] = []
    house.meanwhile[2] = lambda: late.append(Session(house))
    await house.drain(0.2)
    assert late[0].closed is not None
    assert (house.sessions, late[0].at) == ({}, 4)


async def test_without_a_spread_all_go_at_once(house: House) -> None:
    sessions = [Session(house) for _ in range(9)]
    await house.drain(0.0)
    assert ({one.at for one in sessions}, house.step) == ({0}, 0)


async def test_nobody_is_there(house: House) -> None:
    await house.drain(5.0)
    assert house.step == 0


class TestRenewal:
    """Another store: who holds the old one's timelines begins anew, and nobody twice."""

    async def test_who_comes_back_meanwhile_stays(self, house: House) -> None:
        old = [Session(house) for _ in range(20)]
        new: list[Session] = []
        house.meanwhile[5] = lambda: new.extend(Session(house) for _ in range(5))
        renewal, spawned = house.renewal(1.0)
        assert renewal.begin(cast("Any", house.sessions))
        await spawned.pop()
        assert {one.closed.code for one in old if one.closed} == {4503}
        assert {one.said[0]["reason"] for one in old} == {"the store was replaced"}
        assert (list(house.sessions), spawned) == (new, [])

    async def test_unless_it_is_said_again(self, house: House) -> None:
        first = Session(house)
        second: list[Session] = []
        renewal, spawned = house.renewal(0.2)

        def again() -> None:
            second.append(Session(house))
            assert not renewal.begin(cast("Any", house.sessions))

        house.meanwhile[3] = again
        assert renewal.begin(cast("Any", house.sessions))
        await spawned.pop()
        assert (len(first.said), len(second[0].said), house.sessions) == (1, 1, {})
        assert renewal.begin(cast("Any", house.sessions)), "the next one is news again"
        await spawned.pop()
