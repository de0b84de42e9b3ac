"""The journal: what was sent and published goes from the outbox and its deliveries to the log of state changes.

It runs behind the cursors, in SQL alone, and has a cursor of its own: what it writes and that cursor are one
transaction, so that a relay may die at any point. Nobody waits for it. It rests several times as long as it worked, and
longer while the relay itself is behind; then the log is late, which a gauge tells.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from services.relay.metrics import JOURNAL_LAG, JOURNAL_ROWS
from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import RETRIABLE, to_array
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.relay.held import HeldShard
    from shared.postgres import Pool

_SQL = statements(__file__)
_JOURNAL, _LAG = _SQL["journal"], _SQL["lag"]

_MOST_ROWS = 2_000
"""Of a call. It holds a connection for some tens of milliseconds."""

_EVERY_S = 1.0
_LAG_EVERY_S = 5.0
_CALL_S = 15.0
_REST = 4.0
_LONG_REST = 20.0
_LEAST_REST_S = 0.02

_log = logger(__name__)


class Journal:
    """Of the shards of ``held``, under the name ``owner``. ``busy``: whether the relay has better things to do."""

    def __init__(
        self, pool: Pool, owner: str, held: dict[int, HeldShard], busy: Callable[[], bool], *, most: int = _MOST_ROWS
    ) -> None:
        self._pool = pool
        self._owner = owner
        self._held = held
        self._busy = busy
        self._most = most
        self._told_at = float("-inf")

    async def run(self) -> None:
        """Write until cancelled."""
        backoff = Backoff()
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(_CALL_S):
                    more = await self.look()
                    worked_s = time.monotonic() - began
                    await self._tell_lag()
            except RETRIABLE as error:
                LOOP_ERRORS.labels("journal").inc()
                _log.warning("journal not written", error=repr(error))
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            rest = _LONG_REST if self._busy() else _REST
            await asyncio.sleep(max(_LEAST_REST_S, worked_s * rest) if more else _EVERY_S)

    async def look(self) -> bool:
        """Write once; whether there is more."""
        epochs = {number: shard.epoch for number, shard in self._held.items() if not shard.lost}
        if not epochs:
            return False
        row = await self._pool.fetchrow(_JOURNAL, self._owner, to_array(epochs), to_array(epochs.values()), self._most)
        if row is None:
            return False
        JOURNAL_ROWS.inc(row["read"])
        return bool(row["more"])

    async def _tell_lag(self) -> None:
        now = time.monotonic()
        if now >= self._told_at + _LAG_EVERY_S:
            self._told_at = now
            JOURNAL_LAG.set(await self._pool.fetchval(_LAG) or 0.0)
