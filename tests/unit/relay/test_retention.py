import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import asyncpg
import pytest

from services.relay.metrics import PARTITION_CHANGES, RETENTION_PUT_OFF
from services.relay.retention import _CLOSE, _DROP, _EXPIRE, _FORGET_PARKED, _MAKE, _STEP_ROWS, Periods, Retention
from shared.metrics import LOOP_ERRORS
from tests.waiting import until

if TYPE_CHECKING:
    from shared.postgres import Pool

PERIODS = Periods(1.0, 7.0, 30.0)


class Answers:
    """A pool that gives each statement its answers in turn, then None; an error is raised."""

    def __init__(self, **answers: list[object]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    async def fetchval(self, statement: str, *_: object) -> Any:
        return self._answer(statement)

    async def fetch(self, statement: str, *_: object) -> Any:
        return self._answer(statement) or []

    async def fetchrow(self, statement: str, *_: object) -> Any:
        return self._answer(statement)

    def _answer(self, statement: str) -> object:
        self.asked.append(statement)
        name = statement.splitlines()[0].removeprefix("-- ")
        answers = self._answers.get(name, [])
        answer = answers.pop(0) if answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


def retention(answers: Answers) -> Retention:
    return Retention(cast("Pool", answers), PERIODS, look_every_s=0.001)


def changed(change: str) -> float:
    return PARTITION_CHANGES.labels(change)._value.get()


async def test_what_goes_in_steps_goes_on_until_a_step_is_not_full() -> None:
    answers = Answers(forget_parked=[_STEP_ROWS, _STEP_ROWS, 3], drop=["dropped", "dropped", "young"])
    dropped = changed("dropped")
    assert await retention(answers).look()
    assert answers.asked.count(_FORGET_PARKED) == 3
    assert answers.asked.count(_DROP) == 3
    assert changed("dropped") == dropped + 2


async def test_another_relay_at_work_is_no_trouble() -> None:
    answers = Answers()
    made = changed("made")
    assert await retention(answers).look()
    assert changed("made") == made
    assert {_MAKE, _CLOSE, _DROP, _EXPIRE} <= set(answers.asked)


@pytest.mark.parametrize("error", [asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError])
async def test_a_lock_that_is_not_to_be_had_puts_one_step_off(error: Callable[[], Exception]) -> None:
    answers = Answers(close=[error()])
    before = RETENTION_PUT_OFF.labels("close")._value.get()
    assert not await retention(answers).look()
    assert RETENTION_PUT_OFF.labels("close")._value.get() == before + 1
    assert _EXPIRE in answers.asked, "the others are done"


async def test_the_loop_outlives_a_store_that_is_away() -> None:
    answers = Answers(make=[ConnectionRefusedError(), TimeoutError(), asyncpg.LockNotAvailableError()])
    before = LOOP_ERRORS.labels("retention")._value.get()
    running = asyncio.create_task(retention(answers).run())
    try:
        await until(lambda: answers.asked.count(_MAKE) > 5, timeout=10, what="looks")
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert LOOP_ERRORS.labels("retention")._value.get() == before + 2
