"""Buckets of events that nobody counted: those of before there were counts, and those of writers that do not count.

Who counts unread events does without their counts, event by event. So this is in no hurry: it looks through all
conversations, little by little, now and then.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from services.ingest.metrics import COUNTED_LATE
from shared.clock import Backoff
from shared.errors import UnavailableError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from shared.postgres import Pool, Record

_SQL = statements(__file__)
_UNCOUNTED, _CLOSE_LATE = _SQL["uncounted"], _SQL["close_late"]

_LOOP = LOOP_ERRORS.labels("counting")
_FIRST = "00000000-0000-0000-0000-000000000000"
_CONVERSATIONS = 500
"""Conversations that one look takes in."""

_BUCKETS = 16
"""Buckets that are counted in one transaction, which holds up the conversation's writers for some 10 ms."""

_PAUSE_S = 0.1
_TIMEOUT_S = 5.0


class Counting:
    """``every_s``: seconds between the end of a walk through all conversations and the next one, about."""

    def __init__(self, pool: Pool, *, every_s: float = 6 * 3600.0, soon_s: float = 60.0) -> None:
        self._pool = pool
        self._every_s = every_s
        self._soon_s = soon_s

    async def run(self) -> None:
        """Walk until cancelled. Processes that start together do not walk in step."""
        backoff = Backoff(1.0, 60.0)
        after = _FIRST
        await asyncio.sleep(random.uniform(0, self._soon_s))
        while True:
            try:
                last = await self.look(after)
                backoff.reset()
            except UnavailableError as error:
                _LOOP.inc()
                logger(__name__).warning("events are not counted now", error=error.message)
                await asyncio.sleep(backoff.next())
                continue
            except Exception:  # noqa: BLE001 - what cannot be counted today may be tomorrow; unread counts do without
                _LOOP.inc()
                logger(__name__).exception("events could not be counted")
                last = None
            after = last or _FIRST
            await asyncio.sleep(_PAUSE_S if last else self._every_s * random.uniform(0.5, 1.5))

    async def look(self, after: str) -> str | None:
        """Count what is missing of some conversations above an id; the last one's id, None if there are no more.

        Raises `UnavailableError`.
        """
        rows = await self._fetch(_UNCOUNTED, after, _CONVERSATIONS)
        for row in rows:
            if row["lacks"]:
                await self._count(row["conversation_id"])
        return str(rows[-1]["conversation_id"]) if len(rows) == _CONVERSATIONS else None

    async def _count(self, conversation_id: str) -> None:
        counted = _BUCKETS
        while counted == _BUCKETS:
            [(counted,)] = await self._fetch(_CLOSE_LATE, conversation_id, _BUCKETS)
            COUNTED_LATE.inc(counted)
            await asyncio.sleep(_PAUSE_S)

    async def _fetch(self, statement: str, *arguments: object) -> list[Record]:
        with unavailable_if_away():
            async with self._pool.acquire(timeout=_TIMEOUT_S) as connection:
                return await connection.fetch(statement, *arguments, timeout=_TIMEOUT_S)
