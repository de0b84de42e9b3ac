"""When sessions are looked at: none is forgotten, none keeps the others waiting."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import clock as clock_module
from services.gateway.clock import Clock, Heap, Timed
from tests.waiting import until

NEVER = float("inf")


class Session:
    def __init__(self, again: Callable[[float], float] = lambda _: NEVER) -> None:
        self.scheduled = NEVER
        self.ticks: list[float] = []
        self._again = again

    def tick(self, now: float) -> float:
        self.ticks.append(now)
        return self._again(now)


def due(heap: Heap, now: float) -> list[Timed]:
    out = []
    while (timed := heap.due(now)) is not None:
        out.append(timed)
    return out


class TestHeap:
    def test_each_in_its_time(self) -> None:
        heap, (one, two, three) = Heap(), (Session(), Session(), Session())
        for session, at in ((one, 3.0), (two, 1.0), (three, 2.0)):
            heap.at(session, at)
        assert (heap.next, due(heap, 0.9)) == (1.0, [])
        assert due(heap, 2.0) == [two, three]
        assert (two.scheduled, one.scheduled, heap.next) == (NEVER, 3.0, 3.0)
        assert due(heap, 9.0) == [one]
        assert heap.next == NEVER

    def test_an_earlier_time_replaces_a_later_one_and_not_the_other_way_round(self) -> None:
        heap, one = Heap(), Session()
        assert heap.at(one, 5.0)
        assert not heap.at(one, 6.0)
        assert heap.at(one, 2.0)
        assert due(heap, 4.0) == [one]
        assert due(heap, 9.0) == []

    def test_once_it_was_due_a_later_time_counts_again(self) -> None:
        heap, one = Heap(), Session()
        heap.at(one, 1.0)
        assert due(heap, 1.0) == [one]
        assert heap.at(one, 5.0)
        assert due(heap, 5.0) == [one]

    def test_it_says_whether_anything_is_due_earlier_than_before(self) -> None:
        heap, one, two = Heap(), Session(), Session()
        assert heap.at(one, 5.0)
        assert not heap.at(two, 7.0)
        assert heap.at(two, 3.0)
        assert not heap.at(one, NEVER)

    @given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20), st.integers(0, 5)), max_size=60))
    def test_all_are_due_once_at_the_earliest_time_asked_for(self, asked: list[tuple[int, int, int]]) -> None:
        heap, sessions, now = Heap(), [Session() for _ in range(5)], 0.0
        earliest: dict[Any, float] = {}
        for number, after, passes in [*asked, (0, 1_000, 2_000)]:
            one = sessions[number]
            heap.at(one, now + after)
            earliest[one] = min(earliest.get(one, NEVER), now + after)
            now += passes
            expected = {one for one, at in earliest.items() if at <= now}
            assert set(due(heap, now)) == expected
            earliest = {one: at for one, at in earliest.items() if at > now}
        assert heap.next == NEVER


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "_TICK_S", 0.001)


@pytest.mark.usefixtures("quick")
class TestClock:
    async def test_who_is_due_is_looked_at_again_and_again(self) -> None:
        async with running(Clock(lambda _: None, every_s=60.0)) as clock:
            often = Session(lambda now: now + 0.002)
            once = Session()
            later = Session()
            for session, at in ((often, 0.0), (once, 0.0), (later, time.monotonic() + 60.0)):
                clock.at(session, at)
            await until(lambda: len(often.ticks) > 3, timeout=20, what="ticks")
            assert (len(once.ticks), len(later.ticks)) == (1, 0)

    async def test_one_that_becomes_due_while_nobody_else_is_for_long(self) -> None:
        async with running(Clock(lambda _: None, every_s=60.0)) as clock:
            await asyncio.sleep(0)
            one = Session()
            clock.at(one, 0.0)
            await until(lambda: one.ticks, timeout=20, what="its tick")

    async def test_one_that_fails_stops_no_other_and_is_looked_at_again(self) -> None:
        def fails(now: float) -> float:
            raise ValueError

        async with running(Clock(lambda _: None, every_s=60.0)) as clock:
            broken, other = Session(fails), Session(lambda now: now + 0.002)
            clock.at(broken, 0.0)
            clock.at(other, 0.0)
            await until(lambda: len(other.ticks) > 3, timeout=20, what="the other's ticks")
            assert len(broken.ticks) == 1
            assert broken.scheduled == broken.ticks[0] + 1.0

    async def test_chores_are_done_now_and_then_though_one_of_them_fails(self) -> None:
        done: list[float] = []

        def chores(now: float) -> None:
            done.append(now)
            raise ValueError

        async with running(Clock(chores, every_s=0.002)):
            await until(lambda: len(done) > 2, timeout=20, what="chores")

    async def test_many_that_are_due_at_once_let_others_in_between(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(clock_module, "_TURN_S", 1e-9)
        clock, sessions = Clock(lambda _: None, every_s=60.0), [Session() for _ in range(50)]
        for one in sessions:
            clock.at(one, 0.0)
        seen: list[int] = []
        async with running(clock):
            while not all(one.ticks for one in sessions):
                seen.append(sum(bool(one.ticks) for one in sessions))
                await asyncio.sleep(0)
        assert len(set(seen)) > 5


@asynccontextmanager
async def running(clock: Clock) -> AsyncIterator[Clock]:
    """A clock that runs meanwhile."""
    task = asyncio.create_task(clock.run())
    yield clock
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
