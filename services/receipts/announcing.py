"""Marks of large groups, told once a second: a record per member that moved, however often it did."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn, Protocol

from services.receipts.metrics import ANNOUNCED
from services.receipts.store import STORE_AWAY
from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST = 1_000
"""Of one transaction: the shards' locks are held for some 20 ms."""

_FLUSH_S = 10.0
_LOOP = LOOP_ERRORS.labels("announce")


class Flushes(Protocol):
    """Announces what waits."""

    async def flush(self, partitions: Sequence[int], most: int) -> int:
        """How many were announced. Raises what asyncpg raises."""
        ...


class Announcer:
    """Tells the waiting marks of this process's partitions, which are the shards of their conversations."""

    def __init__(self, store: Flushes, partitions: Callable[[], Sequence[int]], *, every_s: float) -> None:
        self._store = store
        self._partitions = partitions
        self._every_s = every_s

    async def run(self) -> NoReturn:
        """Announce until cancelled. What waits then is told by whoever gets the partitions."""
        backoff = Backoff()
        while True:
            await asyncio.sleep(self._every_s)
            try:
                while await self.announce() == _MOST:
                    pass
                backoff.reset()
            except STORE_AWAY as error:
                _LOOP.inc()
                logger(__name__).warning("marks of large groups wait to be told", error=repr(error))
                await asyncio.sleep(backoff.next())

    async def announce(self) -> int:
        """Announce some of what waits; how many marks."""
        partitions = self._partitions()
        if not partitions:
            return 0
        async with asyncio.timeout(_FLUSH_S):
            told = await self._store.flush(partitions, _MOST)
        ANNOUNCED.inc(told)
        return told
