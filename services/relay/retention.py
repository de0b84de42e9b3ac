"""Partitions of the outbox made ahead, closed by time and dropped behind, and dead letters forgotten in the end.

So are the days of the log of state changes, and revocations that ended. The database decides and does it (migrations
`outbox_retention`, `outbox_state` and `gateway`); this loop asks, counts and tells.
Each step is a transaction of its own that waits for a lock for a tenth of a second at most: not to get one is an
ordinary case, since whoever holds it goes first.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

from services.relay.metrics import (
    JOURNAL_SKIPPED,
    LETTERS_EXPIRED,
    OLDEST_LETTER,
    PARTITION_CHANGES,
    PARTITIONS_AHEAD,
    PARTITIONS_BEHIND,
    RETENTION_PUT_OFF,
)
from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import RETRIABLE
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from uuid import UUID

    from shared.postgres import Pool

_SQL = statements(__file__)
_MAKE, _CLOSE, _SUMMARISE = _SQL["make"], _SQL["close"], _SQL["summarise"]
_SKIP_JOURNAL, _DROP, _DROP_DELIVERIES = _SQL["skip_journal"], _SQL["drop"], _SQL["drop_deliveries"]
_FORGET_PARKED, _EXPIRE, _GAUGES = _SQL["forget_parked"], _SQL["expire_letters"], _SQL["gauges"]
_MAKE_DAYS, _DROP_DAY, _FORGET_REVOCATIONS = _SQL["make_days"], _SQL["drop_day"], _SQL["forget_revocations"]

PARTITIONS_MADE_AHEAD = 16
DAYS_MADE_AHEAD = 14

_STEP_ROWS = 1_000
"""What is deleted row by row goes in such steps: each holds its locks for some 10 ms."""

_STEP_S = 15.0
_LOOK_EVERY_S = 60.0
_UNSETTLED = ("dead", "retrying")

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Periods:
    """How long things last, in seconds.

    ``partition_s``: ids are drawn in one partition. ``outbox_s``: a partition is kept after its newest row.
    ``letters_s``: a dead letter is kept once it is settled, or since it died if nobody settles it. ``transitions_s``: a
    day of the log of state changes is kept after its end.
    """

    partition_s: float
    outbox_s: float
    letters_s: float
    transitions_s: float = 2_592_000.0


class Retention:
    """Looks once a minute. Of several relays any may do a step, and one at a time does."""

    def __init__(self, pool: Pool, periods: Periods, *, look_every_s: float = _LOOK_EVERY_S) -> None:
        self._pool = pool
        self._periods = periods
        self._look_every_s = look_every_s
        self._steps: tuple[tuple[str, Callable[[], Awaitable[None]]], ...] = (
            ("make", self._make),
            ("close", self._close),
            ("summarise", self._summarise),
            ("skip_journal", self._skip_journal),
            ("drop", self._drop),
            ("drop_deliveries", self._drop_deliveries),
            ("forget", self._forget_parked),
            ("letters", self._expire_letters),
            ("make_days", self._make_days),
            ("drop_days", self._drop_days),
            ("revocations", self._forget_revocations),
            ("gauges", self._gauges),
        )

    async def run(self) -> None:
        """Look until cancelled. What could not be done is tried again within the minute, later each time."""
        backoff = Backoff(base_s=1.0, cap_s=self._look_every_s)
        while True:
            try:
                done = await self.look()
            except RETRIABLE as error:
                done = False
                LOOP_ERRORS.labels("retention").inc()
                _log.warning("retention not done", error=repr(error))
            if done:
                backoff.reset()
            await asyncio.sleep(self._look_every_s if done else backoff.next())

    async def look(self) -> bool:
        """Do each step once; whether none was put off. Raises what asyncpg raises, `TimeoutError` included."""
        put_off = []
        for name, step in self._steps:
            try:
                await step()
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
                RETENTION_PUT_OFF.labels(name).inc()
                put_off.append(name)
        if put_off:
            _log.info("retention put off: a lock was held by others", steps=put_off)
        return not put_off

    async def _ask(self, statement: str, *arguments: object) -> Any:
        async with asyncio.timeout(_STEP_S):
            return await self._pool.fetchval(statement, *arguments)

    async def _make(self) -> None:
        made: int | None = await self._ask(_MAKE, PARTITIONS_MADE_AHEAD)
        PARTITION_CHANGES.labels("made").inc(made or 0)

    async def _close(self) -> None:
        next_id: int | None = await self._ask(_CLOSE, self._periods.partition_s)
        if next_id is not None:
            PARTITION_CHANGES.labels("closed").inc()
            _log.info("outbox partition closed", next_id=next_id)

    async def _summarise(self) -> None:
        await self._ask(_SUMMARISE)

    async def _skip_journal(self) -> None:
        skipped: int | None = await self._ask(_SKIP_JOURNAL, self._periods.outbox_s)
        if skipped:
            JOURNAL_SKIPPED.inc(skipped)
            _log.error(
                "the log of state changes lacks rows: the outbox drops them before they were logged", rows=skipped
            )

    async def _drop(self) -> None:
        while (outcome := await self._ask(_DROP, self._periods.outbox_s)) == "dropped":
            PARTITION_CHANGES.labels("dropped").inc()
            _log.info("outbox partition dropped")
        if outcome == "unresolved":
            _log.warning("the oldest outbox partition is past its time, but a row of it is not published or dead yet")

    async def _drop_deliveries(self) -> None:
        while await self._ask(_DROP_DELIVERIES):
            pass

    async def _forget_parked(self) -> None:
        while await self._ask(_FORGET_PARKED, _STEP_ROWS) == _STEP_ROWS:
            pass

    async def _expire_letters(self) -> None:
        while True:
            async with asyncio.timeout(_STEP_S):
                rows = await self._pool.fetch(_EXPIRE, self._periods.letters_s, _STEP_ROWS)
            for row in rows:
                LETTERS_EXPIRED.labels(row["state"]).inc()
                if row["state"] in _UNSETTLED:
                    _log.error(
                        "dead letter expired: nobody retried or discarded it in time",
                        dead_id=row["dead_id"],
                        event_id=_named(row["event_id"]),
                        conversation_id=_named(row["conversation_id"]),
                        topic=row["topic"],
                        error=row["error"],
                        died_at=row["died_at"].isoformat(),
                    )
            if len(rows) < _STEP_ROWS:
                return

    async def _make_days(self) -> None:
        await self._ask(_MAKE_DAYS, DAYS_MADE_AHEAD)

    async def _drop_days(self) -> None:
        while await self._ask(_DROP_DAY, self._periods.transitions_s):
            _log.info("a day of the log of state changes dropped")

    async def _forget_revocations(self) -> None:
        await self._ask(_FORGET_REVOCATIONS)

    async def _gauges(self) -> None:
        async with asyncio.timeout(_STEP_S):
            row = await self._pool.fetchrow(_GAUGES)
        if row is not None:
            PARTITIONS_AHEAD.set(row["ahead"])
            PARTITIONS_BEHIND.set(row["behind"])
            OLDEST_LETTER.set(row["oldest_letter_s"] or 0.0)


def _named(id_: UUID | None) -> str | None:
    return None if id_ is None else str(id_)
