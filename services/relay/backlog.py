"""What is not in Kafka yet, whoever holds its shard: above the cursors, parked, dead. Watched, never acted upon."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from services.relay.metrics import BACKLOG, DEAD_LETTERS, LETTER_STATES, OLDEST_PARKED, OLDEST_UNSENT
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import RETRIABLE
from shared.statements import statements

if TYPE_CHECKING:
    from shared.postgres import Pool

_SQL = statements(__file__)
_OLDEST, _BACKLOG, _PARKED, _LETTERS = _SQL["oldest_unsent"], _SQL["backlog"], _SQL["parked"], _SQL["letters"]

_EVERY_S = 1.0
_COUNT_EVERY_S = 10.0
_LOOK_S = 15.0
MOST_COUNTED = 10_000

_log = logger(__name__)


class Backlog:
    """``oldest_s``: age of the oldest row above the cursors, in seconds. Ages every second, counts every ten."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._counted_at = float("-inf")
        self.oldest_s = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self.look()
            except RETRIABLE as error:
                LOOP_ERRORS.labels("backlog").inc()
                _log.warning("backlog not looked at", error=repr(error))
            await asyncio.sleep(_EVERY_S)

    async def look(self) -> None:
        """Look once."""
        self.oldest_s = await self._pool.fetchval(_OLDEST) or 0.0
        OLDEST_UNSENT.set(self.oldest_s)
        if time.monotonic() >= self._counted_at + _COUNT_EVERY_S:
            await self._count()
            self._counted_at = time.monotonic()

    async def _count(self) -> None:
        for shard, rows in await self._pool.fetch(_BACKLOG, MOST_COUNTED):
            BACKLOG.labels(str(shard)).set(rows)
        parked, oldest_s = await self._pool.fetchrow(_PARKED) or (0, None)
        DEAD_LETTERS.labels("parked").set(parked)
        OLDEST_PARKED.set(oldest_s or 0.0)
        counts: dict[str, int] = dict(await self._pool.fetch(_LETTERS))  # type: ignore[arg-type]  # rows of two columns
        for state in LETTER_STATES:
            DEAD_LETTERS.labels(state).set(counts.get(state, 0))
