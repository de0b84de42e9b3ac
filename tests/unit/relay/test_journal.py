import asyncio
from types import SimpleNamespace
from typing import Any, cast

import asyncpg
import pytest

from services.relay import journal
from services.relay.held import HeldShard
from services.relay.journal import Journal
from services.relay.metrics import JOURNAL_LAG, JOURNAL_ROWS
from services.relay.shards import Taken
from shared.metrics import LOOP_ERRORS


class Clock:
    """Takes the place of `time` and of `asyncio` in the module: passes by the work of the pool and by sleeping."""

    def __init__(self, patch: pytest.MonkeyPatch, looks: int) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self._looks = looks
        patch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(journal, "asyncio", SimpleNamespace(sleep=self.sleep, timeout=asyncio.timeout))

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds
        if len(self.slept) == self._looks:
            raise asyncio.CancelledError


class Answers:
    """A pool: of each call how long it takes, and whether there is more; or an error."""

    def __init__(self, clock: Clock, *answers: tuple[float, bool] | Exception) -> None:
        self._clock = clock
        self._answers = list(answers)
        self.asked: list[tuple[Any, ...]] = []
        self.lags = 0

    async def fetchrow(self, _: str, *arguments: Any) -> dict[str, Any]:
        self.asked.append(arguments)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self._clock.now += answer[0]
        return {"read": 5, "more": answer[1]}

    async def fetchval(self, *_: Any) -> float:
        self.lags += 1
        return 7.5


def held(*numbers: int) -> dict[int, HeldShard]:
    return {number: HeldShard(Taken(number, number + 10, 0), 1e9) for number in numbers}


async def run(made: Journal) -> None:
    with pytest.raises(asyncio.CancelledError):
        await made.run()


async def test_it_rests_by_the_length_of_its_work_and_longer_while_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, looks=5)
    pool = Answers(clock, (0.05, True), (0.001, True), (0.05, True), (0.05, False), (0.05, True))
    busy = iter([False, False, True, True, False])
    rows = JOURNAL_ROWS._value.get()
    await run(Journal(cast("Any", pool), "ann", held(3, 5), lambda: next(busy), most=9))
    assert clock.slept == [0.2, 0.02, 1.0, 1.0, 0.2]
    assert set(pool.asked) == {("ann", "{3,5}", "{13,15}", 9)}
    assert JOURNAL_ROWS._value.get() == rows + 25
    assert (pool.lags, JOURNAL_LAG._value.get()) == (1, 7.5), "the lag is not asked for at each turn"


async def test_of_what_was_lost_it_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, looks=1)
    pool, shards = Answers(clock), held(3)
    shards[3].lose()
    await run(Journal(cast("Any", pool), "ann", shards, lambda: False))
    assert (pool.asked, clock.slept) == ([], [1.0])


async def test_while_postgres_is_away_it_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, looks=3)
    pool = Answers(clock, asyncpg.LockNotAvailableError(), OSError(), (0.01, False))
    errors = LOOP_ERRORS.labels("journal")._value.get()
    await run(Journal(cast("Any", pool), "ann", held(1), lambda: False))
    assert LOOP_ERRORS.labels("journal")._value.get() == errors + 2
    assert clock.slept[2] == 1.0
