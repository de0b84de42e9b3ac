from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import asyncpg

from services.relay.erasing import _EXPIRE, _TO_VACUUM, _VACUUM, _VACUUMED, Erasing
from services.relay.metrics import BODIES_EXPIRED, RETENTION_PUT_OFF, UNVACUUMED
from shared.metrics import LOOP_ERRORS
from tests.waiting import until

if TYPE_CHECKING:
    from shared.postgres import Pool

NOTHING = {"conversations": 0, "bodies": 0, "is_more": False}


class Answers:
    """A pool that gives each statement its answers in turn, then the last one again; an error is raised."""

    def __init__(self, **answers: list[object]) -> None:
        self._answers: dict[str, list[object]] = {"expire": [NOTHING], **answers}
        self.asked: list[str] = []

    async def fetchval(self, statement: str, *_: object) -> Any:
        return self._answer(statement)

    async def fetchrow(self, statement: str, *_: object) -> Any:
        return self._answer(statement)

    async def execute(self, statement: str, *, timeout: float) -> Any:
        assert timeout < 8, "the role's own limit"
        return self._answer(statement)

    def _answer(self, statement: str) -> object:
        self.asked.append(statement)
        answers = self._answers.get(statement.splitlines()[0].removeprefix("-- "), [None])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def erasing(answers: Answers) -> Erasing:
    return Erasing(cast("Pool", answers), 604_800.0, look_every_s=0.001)


async def test_steps_follow_each_other_until_there_is_no_more() -> None:
    more = {"conversations": 9, "bodies": 4, "is_more": True}
    answers = Answers(expire=[more, more, {**more, "is_more": False}])
    before = BODIES_EXPIRED._value.get()
    assert await erasing(answers).expire() == 12
    assert BODIES_EXPIRED._value.get() == before + 12
    assert answers.asked.count(_EXPIRE) == 3


async def test_another_relay_at_work_is_no_trouble() -> None:
    assert await erasing(Answers(expire=[None])).expire() == 0


async def test_a_vacuum_that_is_cut_short_is_counted_and_not_taken_for_done() -> None:
    answers = Answers(to_vacuum=[{"upto": "7", "began": None}], vacuum=[TimeoutError(), None], vacuumed=[True])
    answers._answers["gauges"] = [99.0]
    before = RETENTION_PUT_OFF.labels("vacuum")._value.get()
    assert not await erasing(answers).vacuum()
    assert _VACUUMED not in answers.asked
    assert (RETENTION_PUT_OFF.labels("vacuum")._value.get(), UNVACUUMED._value.get()) == (before + 1, 99.0)
    assert await erasing(answers).vacuum()


async def test_nothing_is_vacuumed_without_need() -> None:
    answers = Answers(to_vacuum=[{"upto": None, "began": None}])
    assert not await erasing(answers).vacuum()
    assert _VACUUM not in answers.asked


async def test_the_loop_outlives_a_store_that_is_away() -> None:
    answers = Answers(expire=[ConnectionRefusedError(), asyncpg.LockNotAvailableError(), TimeoutError(), NOTHING])
    before = LOOP_ERRORS.labels("erasing")._value.get()
    running = asyncio.create_task(erasing(answers).run())
    try:
        await until(lambda: answers.asked.count(_EXPIRE) > 5, timeout=10, what="looks")
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert LOOP_ERRORS.labels("erasing")._value.get() == before + 3


async def test_a_round_that_takes_days_keeps_no_vacuum_waiting() -> None:
    answers = Answers(expire=[{"conversations": 1, "bodies": 1, "is_more": True}], to_vacuum=[None])
    endless = Erasing(cast("Pool", answers), 604_800.0, look_every_s=3_600.0, stretch_s=0.001)
    running = asyncio.create_task(endless.run())
    try:
        await until(lambda: answers.asked.count(_TO_VACUUM) > 2, timeout=10, what="looks for what to vacuum")
    finally:
        running.cancel()
        await asyncio.wait([running])
