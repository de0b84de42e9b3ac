"""After records may have been missed: what Kafka would have told is read from Postgres once, for all sessions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from services.gateway.listing import Marks
from shared.clock import Backoff
from shared.errors import UnavailableError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from services.gateway.fanout import Fanout
    from shared.postgres import Pool

_SQL = statements(__file__)
_HEADS = _SQL["heads"]
_BELONGINGS = _SQL["belongings"]
_RECEIPTS = _SQL["receipts"]
_LOOP = LOOP_ERRORS.labels("recheck")
_AT_ONCE = 500


class Recheck:
    """Compares heads and memberships, and tells all marks again. A failure is tried again until all was compared."""

    def __init__(self, pool: Pool, fanout: Fanout) -> None:
        self._pool = pool
        self._fanout = fanout
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Compare everything once, from now on: call it when Kafka's positions are fixed again."""
        self._asked.set()

    async def run(self) -> None:
        """Compare when asked, until cancelled."""
        backoff = Backoff(0.1, 5.0)
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                await self._users()
                await self._heads()
                await self._receipts()
                backoff.reset()
            except UnavailableError:
                _LOOP.inc()
                logger(__name__).warning("conversations are not compared: Postgres is away")
                self._asked.set()
                await asyncio.sleep(backoff.next())

    async def _users(self) -> None:
        users = list(self._fanout.users)
        for start in range(0, len(users), _AT_ONCE):
            with unavailable_if_away():
                rows = await self._pool.fetch(_BELONGINGS, users[start : start + _AT_ONCE])
            for row in rows:
                self._fanout.belongs(row["user_id"], row["conversation_id"])

    async def _heads(self) -> None:
        rooms = list(self._fanout.rooms)
        for start in range(0, len(rooms), _AT_ONCE):
            with unavailable_if_away():
                rows = await self._pool.fetch(_HEADS, rooms[start : start + _AT_ONCE])
            self._fanout.heads({row["conversation_id"]: row["last_seq"] for row in rows})

    async def _receipts(self) -> None:
        # Clients merge marks, so one that they know already changes nothing.
        rooms = list(self._fanout.rooms)
        for start in range(0, len(rooms), _AT_ONCE):
            with unavailable_if_away():
                rows = await self._pool.fetch(_RECEIPTS, rooms[start : start + _AT_ONCE])
            for row in rows:
                self._fanout.receipt(row["conversation_id"], Marks(*row[1:]).frame(row["conversation_id"]))
